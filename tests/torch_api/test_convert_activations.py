"""Alias-free activations of other packages in ``convert``, and both kinds in ``freeze``."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from numba_tconv import AliasFreeActivation, convert, freeze, unfreeze
from numba_tconv.torch_api import alias_free_operators as ops
from tests.published_activations import Activation1d, Fused, Snake, Tiny, TorchActivation1d, taps

from .test_freeze import COMPILERS, ENDINGS

C = 3
X = torch.randn(2, C, 9, generator=torch.Generator().manual_seed(0))


def called(layer, x=X):
    with torch.no_grad():
        return layer(x)


MODULES = {
    "SnakeBeta": lambda: Activation1d(Snake(C)),
    "Snake": lambda: Activation1d(Snake(C, beta=False)),
    "SnakeBeta, linear": lambda: Activation1d(Snake(C, log_scale=False)),
    "Snake, linear": lambda: Activation1d(Snake(C, log_scale=False, beta=False)),
    **{cls.__name__: lambda cls=cls: Activation1d(cls()) for cls in (nn.SiLU, nn.LeakyReLU, nn.ELU, nn.GELU)},
    "identity": lambda: Activation1d(nn.Identity()),
    "ratios 3 and 2": lambda: Activation1d(Snake(C), 3, 2, 18, 13),
    "transformers'": lambda: TorchActivation1d(Snake(C)),
    "transformers', half": lambda: TorchActivation1d(Snake(C)).bfloat16(),
    "NVIDIA's CUDA kernel": lambda: Fused(Snake(C)),
    "no gradients": lambda: Activation1d(Snake(C)).requires_grad_(False).eval(),
}


@pytest.mark.parametrize("what", MODULES)
def test_an_activation_stays_what_it_is_but_for_who_computes_it(what):
    torch.manual_seed(5)
    module = MODULES[what]()
    x, seen, state = X.to(module.upsample.filter.dtype), [], torch.random.get_rng_state()
    module.register_forward_hook(lambda *_: seen.append(1))
    keys, attributes, cls = list(module.state_dict()), dict(vars(module)), type(module)
    plain = copy.deepcopy(module)
    plain.fused = False
    expected = plain(x)
    seen.clear()

    report = convert(module)
    assert (report.replaced, report.activations, report.left, int(report)) == (0, 1, {}, 0)
    assert seen == []
    assert isinstance(module, AliasFreeActivation)
    assert isinstance(module, cls)
    assert type(module).__name__ == cls.__name__
    assert torch.equal(torch.random.get_rng_state(), state)
    assert list(module.state_dict()) == keys
    assert vars(module).keys() - {"_form"} == attributes.keys()
    assert all(vars(module)[name] is value for name, value in attributes.items())
    torch.testing.assert_close(module(x), expected)
    assert seen == [1]
    assert convert(module).activations == 0
    module._forward_hooks.clear()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module)
        assert torch.equal(other(x), module(x))


def test_a_model_is_converted_and_trains_alike():
    theirs = Tiny().double()
    ours = copy.deepcopy(theirs)
    report = convert(ours)
    assert str(report) == "2 layers and 2 activations replaced, 0 left"
    assert int(report) == 2
    x = torch.randn(2, 16, 5).double()
    for model in (theirs, ours):
        model(x).square().mean().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


class Perturbed(Activation1d):
    """Its output differs by a millionth at one end."""

    def forward(self, x):
        y = super().forward(x)
        return torch.cat([y[..., :-1], y[..., -1:] + 1e-6], -1)


class ZeroPadded(Activation1d):
    def forward(self, x):
        return self.downsample(nn.functional.pad(self.act(self.upsample(x)), (1, 1)))[..., : x.shape[-1]]


class Mixed(Activation1d):
    """Its samples see each other; one alone sees nothing."""

    def forward(self, x):
        return super().forward(x) + x - x.mean(0)


class ByChannel(Activation1d):
    """A filter a channel, of which the first changes nothing."""

    def forward(self, x):
        y, taps = super().forward(x), torch.arange(1, C + 1, dtype=x.dtype)
        return nn.functional.conv1d(y, taps[:, None, None], stride=1, groups=C)


class OnlyInEval(Activation1d):
    def forward(self, x):
        return super().forward(x) * (2 if self.training else 1)


def other_act(act):
    return lambda: Activation1d(act)


def changed(change):
    def make():
        module = Activation1d(Snake(C))
        change(module)
        return module

    return make


def by_fx(module):
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, *_):
            return True

    return torch.fx.GraphModule(module, Tracer().trace(module))


class Masked(Activation1d):
    def forward(self, x, mask=None):
        y = super().forward(x)
        return y if mask is None else y * mask


class Reading(Snake):
    """Its exponent is not what was thought of: alpha twice."""

    def forward(self, x):
        return x + torch.sin(x * self.alpha.exp()[:, None]) ** 2 / (self.alpha.exp()[:, None] + 1e-9)


class Final(Activation1d):
    def __init_subclass__(cls):
        raise ValueError("Final is final")


LEFT = {
    "a difference of 1e-6": (lambda: Perturbed(Snake(C)), "it computes something else: in float64 the two differ by "),
    "another padding": (lambda: ZeroPadded(Snake(C)), "it computes something else"),
    "a mean over samples": (lambda: Mixed(Snake(C)), "it computes something else"),
    "channels that differ": (lambda: ByChannel(Snake(C)), "it computes something else"),
    "another function in training": (lambda: OnlyInEval(Snake(C)).eval(), "it computes something else"),
    "an unused beta": (other_act(Reading(C)), "it computes something else"),
    "another argument": (lambda: Masked(Snake(C)), "its forward takes x, mask, where this package's takes x"),
    "final": (lambda: Final(Snake(C)), "its class Final takes no other base: Final is final"),
    "one alpha for all channels": (lambda: Activation1d(Snake(1)), "its alpha is one number, for any number of"),
    "another slope": (other_act(nn.LeakyReLU(0.1)), "it computes something else"),
    "an unknown activation": (other_act(nn.Tanh()), "its activation Tanh is not known"),
    "a filter of 40 taps": (lambda: Activation1d(Snake(C), 2, 2, 40), "up_filter must have from 2 to 32 taps, got 40"),
    "a filter a channel": (
        changed(lambda m: setattr(m.upsample, "filter", m.upsample.filter.expand(C, 1, -1).clone())),
        "up_filter must have one dimension",
    ),
    "a hook inside": (changed(lambda m: m.act.register_forward_hook(print)), "its act has a hook"),
    "a hook before": (
        changed(lambda m: m.downsample.lowpass.register_forward_pre_hook(print)),
        "its downsample.lowpass has a hook",
    ),
    "its own forward": (
        changed(lambda m: setattr(m, "forward", m.act.forward)),
        "its forward was replaced on the layer itself",
    ),
    "an own submodule": (changed(lambda m: setattr(m, "drop", nn.Dropout())), "it has a submodule of its own, 'drop'"),
    "parametrized": (
        changed(lambda m: parametrize.register_parametrization(m.act, "alpha", nn.Identity())),
        "it has a submodule of its own, 'act.parametrizations'",
    ),
    "traced by fx": (lambda: by_fx(Activation1d(nn.SiLU())), "it is a torch.fx.GraphModule"),
    "no ratio": (changed(lambda m: (delattr(m.upsample, "ratio"), delattr(m.upsample, "stride"))), "could not be"),
    "on no device": (
        lambda: Activation1d(Snake(C)).to("meta"),
        "it could not be compared with this",
    ),
    "lazy": (
        changed(lambda m: setattr(m.act, "alpha", nn.UninitializedParameter())),
        "it is lazy: convert it after its first call",
    ),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_is_left_with_the_reason(what):
    make, reason = LEFT[what]
    module = make()
    cls, attributes, tensors = type(module), dict(vars(module)), [id(one) for one in module.parameters()]
    report = convert(nn.Sequential(module))
    assert report.activations == 0
    assert list(report.left) == ["0"]
    assert reason in report.left["0"]
    assert type(module) is cls
    assert dict(vars(module)) == attributes
    assert [id(one) for one in module.parameters()] == tensors


@pytest.mark.parametrize("frozen", [False, True])
def test_filters_are_cast_as_transformers_xcodec2_casts_them(frozen):
    """Its filters stay float32 in a model that is loaded in bfloat16."""
    module = Activation1d(Snake(C)).bfloat16().eval()
    expected = called(module, X.bfloat16())
    for one in (module.upsample, module.downsample.lowpass):
        one.filter = one.filter.float()
    report = convert(module, freeze=frozen)
    assert report.activations == 1
    assert torch.equal(called(module, X.bfloat16()), expected)


def test_a_scripted_activation_is_left():
    class Plain(Activation1d):
        def forward(self, x: torch.Tensor):
            return self.act(x)

    module = Plain(nn.SiLU())
    module.upsample, module.downsample = nn.Identity(), nn.Identity()
    for part in (module.upsample, module.downsample):
        part.register_buffer("filter", taps(12))
    scripted = torch.jit.script(module)
    assert convert(scripted).left == {"": "it is scripted"}


def test_it_is_compared_in_the_callers_dtype_of_nothing():
    """Neither autocast, the default device nor inference mode reaches the comparison."""
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        with torch.device("cpu"):
            module = Activation1d(Snake(C))
        assert convert(module).activations == 1
    with torch.inference_mode():
        assert convert(Activation1d(Snake(C))).activations == 1


def test_it_is_compared_on_one_thread(monkeypatch):
    seen, forward, before = [], Activation1d.forward, torch.get_num_threads()
    monkeypatch.setattr(
        Activation1d, "forward", lambda self, x: seen.append(torch.get_num_threads()) or forward(self, x)
    )
    torch.set_num_threads(3)
    try:
        assert convert(nn.Sequential(Activation1d(Snake(3)))).activations == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


def test_autocast_casts_as_torchs_convolutions_do():
    module = Activation1d(Snake(C))
    converted = copy.deepcopy(module)
    convert(converted)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = module(X), converted(X)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("make", [lambda: AliasFreeActivation(C), MODULES["transformers'"]], ids=["layer", "converted"])
def test_compiled_and_exported_it_is_torchs_operators(make):
    layer = make()
    convert(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), layer(X))
    freeze(layer.eval())
    program = torch.export.export(layer, (X,))
    torch.testing.assert_close(program.module()(X), layer(X))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert targets
    assert all(target.startswith("aten.") for target in targets)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script cannot compile"):
        torch.jit.script(layer)
    traced = torch.fx.symbolic_trace(layer)
    torch.testing.assert_close(traced(X), layer(X))


# freeze


def frozen_one(dtype=torch.float32):
    module = Activation1d(Snake(C)).to(dtype).eval()
    convert(module)
    return module


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_frozen_activation_gives_the_same_numbers_without_exponentials(dtype, monkeypatch):
    module, x = frozen_one(dtype), X.to(dtype)
    expected, keys = called(module, x), list(module.state_dict())
    report = freeze(module)
    folded = dtype.itemsize > 2
    assert (report.frozen, report.left, report.bytes) == (1, {}, folded * 2 * C * dtype.itemsize)
    seen, composed = [], ops.composed
    monkeypatch.setattr(ops, "composed", lambda *given: seen.append(given[7]) or composed(*given))
    assert torch.equal(called(module, x), expected)
    assert seen == [not folded]
    assert list(module.state_dict()) == keys
    assert unfreeze(module) == 1
    assert module._frozen is None


@pytest.mark.parametrize("end", ENDINGS)
@pytest.mark.parametrize("make", [frozen_one, lambda: AliasFreeActivation(C).eval()], ids=["converted", "layer"])
def test_what_ends_it(make, end):
    module = make()
    freeze(module)
    before = called(module)
    ENDINGS[end](module, X)
    with torch.no_grad():
        module.act.alpha.add_(0.5)
    assert not torch.equal(called(module), before)
    assert module._frozen is None


def test_a_write_to_a_frozen_one_is_not_seen_and_a_new_parameter_is():
    module = frozen_one()
    freeze(module)
    before = called(module)
    with torch.no_grad():
        module.act.alpha.add_(0.5)
    assert torch.equal(called(module), before)
    module.act.alpha = nn.Parameter(module.act.alpha.detach().clone())
    assert not torch.equal(called(module), before)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_code_takes_the_parameters_as_they_are(compiler):
    module = frozen_one()
    freeze(module)
    with torch.no_grad():
        compiled = COMPILERS[compiler](module, X)
        module.act.alpha.add_(0.5)
    torch.testing.assert_close(called(compiled), called(copy.deepcopy(module)))


def test_a_part_that_a_frozen_one_gets_is_used():
    module = frozen_one()
    freeze(module)
    called(module)
    module.act = Snake(C, beta=False)
    expected = called(Activation1d(module.act))
    torch.testing.assert_close(called(module), expected)
    freeze(module)
    called(module)
    module.act.beta = nn.Parameter(torch.zeros(C))
    torch.testing.assert_close(called(module), called(Activation1d(module.act)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), copy.copy])
def test_copies_are_not_frozen(copied):
    module = frozen_one()
    freeze(module)
    other = copied(module)
    with torch.no_grad():
        other.act.alpha.data = other.act.alpha + 0.5
    assert not torch.equal(called(other), called(copy.deepcopy(frozen_one())))
    assert module._frozen is not None


def test_convert_freezes_too_and_needs_eval_mode():
    model = Tiny().eval()
    assert convert(model, freeze=True).freezing.frozen == 4
    model.activations[0].training = True
    with pytest.raises(RuntimeError, match=r"activations\.0 is in train mode"):
        freeze(model)


def test_the_gradient_for_x_of_a_frozen_one():
    module = frozen_one().requires_grad_(False)
    x = [X.clone().requires_grad_() for _ in range(2)]
    module(x[0]).sum().backward()
    freeze(module)
    module(x[1]).sum().backward()
    assert module._frozen is not None
    torch.testing.assert_close(x[0].grad, x[1].grad)
