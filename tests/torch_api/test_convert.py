"""``convert``: the replaced layers, what stays as it was, and a reason for each layer left."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import numba_tconv
from numba_tconv import convert
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import accuracy, bench
from numba_tconv.lab.measure.directions import Operands
from numba_tconv.torch_api import module as ours_module

SIZES = dict(in_channels=4, out_channels=6, kernel_size=5, stride=3, padding=1, output_padding=2, groups=2)


class Initialised(nn.ConvTranspose1d):
    """A subclass that leaves ``forward`` to torch."""

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def extra_repr(self):
        return f"initialised, {super().extra_repr()}"


class Cropping(nn.ConvTranspose1d):
    def forward(self, x):
        return super().forward(x)[..., :-1]


class Squeezing(Cropping):
    """Two forwards, each calling the next; the second is a decorated function of its own class."""

    @torch.no_grad()
    def forward(self, x):
        return super().forward(x.unsqueeze(0)).squeeze(0)


class OwnForward(nn.ConvTranspose1d):
    def forward(self, x):
        return nn.functional.conv_transpose1d(x, self.weight, self.bias, self.stride)


class UnderOwnForward(OwnForward):
    def forward(self, x):
        return super().forward(x)


class OwnOutputPadding(nn.ConvTranspose1d):
    def _output_padding(self, *sizes, **others):
        return [1]


class ByName(nn.ConvTranspose1d):
    def __init__(self, *args, **kwargs):
        nn.ConvTranspose1d.__init__(self, *args, **kwargs)


class Own(nn.ConvTranspose1d):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.precision = "high"


class Unfreezing(nn.ConvTranspose1d):
    def _unfreeze(self):
        self.requires_grad_(True)


class Final(nn.ConvTranspose1d):
    def __init_subclass__(cls):
        raise ValueError("Final is final")


class Rescale(nn.Module):
    def forward(self, x):
        return 2 * x


def layer(cls=nn.ConvTranspose1d, **others):
    return cls(**SIZES | others)


def old_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module)


def rescaled_bias(module):
    parametrize.register_parametrization(module, "bias", Rescale())
    return parametrizations.weight_norm(module)


@pytest.fixture
def calls(monkeypatch):
    """The number of outputs of each call of this package's function by a layer."""
    seen = []

    def counted(*args, **kwargs):
        y = numba_tconv.conv_transpose1d(*args, **kwargs)
        seen.append(y.shape[1])
        return y

    monkeypatch.setattr(ours_module, "conv_transpose1d", counted)
    return seen


MAKERS = {
    "plain": layer,
    "without a bias": lambda: layer(bias=False),
    "half": lambda: layer(dtype=torch.bfloat16),
    "double": lambda: layer(dtype=torch.float64),
    "frozen": lambda: layer().requires_grad_(False),
    "evaluated": lambda: layer().eval(),
    "old weight_norm": lambda: old_weight_norm(layer()),
    "new weight_norm": lambda: parametrizations.weight_norm(layer()),
    "two parametrizations": lambda: rescaled_bias(layer()),
    "subclass": lambda: layer(Initialised),
    "subclass, old weight_norm": lambda: old_weight_norm(layer(Initialised)),
    "subclass, new weight_norm": lambda: parametrizations.weight_norm(layer(Initialised)),
}


@pytest.mark.parametrize("what", MAKERS)
def test_a_layer_stays_what_it_is_but_for_who_computes_it(what, calls):
    module = MAKERS[what]()
    module.register_buffer("counter", torch.zeros(3))
    parameters, name = dict(module.named_parameters()), type(module).__name__
    gradients_wanted = [one.requires_grad for one in parameters.values()]
    x = torch.randn(2, 4, 7, dtype=next(module.parameters()).dtype)
    expected = module(x)
    attributes = dict(vars(module))
    assert calls == []

    assert int(convert(module)) == 1
    assert isinstance(module, numba_tconv.ConvTranspose1d)
    assert type(module).__name__ == name
    # Parameters, buffers, hooks and mode: the object holds what it held.
    assert vars(module).keys() - {"variant", "precision"} == attributes.keys()
    assert all(vars(module)[name] is value for name, value in attributes.items())
    assert dict(module.named_parameters()).keys() == parameters.keys()
    assert all(one is parameters[name] for name, one in module.named_parameters())
    assert [one.requires_grad for one in module.parameters()] == gradients_wanted
    assert torch.equal(module(x), expected)
    assert calls == [6]
    assert torch.equal(module(x, output_size=[22]), expected[..., :22])


@pytest.mark.parametrize("what", MAKERS)
def test_checkpoints_load_on_both_sides(what):
    original = MAKERS[what]()
    module = copy.deepcopy(original) if "old" not in what else MAKERS[what]()
    assert int(convert(module)) == 1
    state = {name: torch.randn_like(value) for name, value in original.state_dict().items()}
    for one in (original, module):
        assert one.load_state_dict(state) == ([], [])
    x = torch.randn(1, 4, 5, dtype=next(module.parameters()).dtype)
    assert torch.equal(module(x), original(x))
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert list(module.state_dict()) == list(original.state_dict())


@pytest.mark.parametrize("what", MAKERS)
def test_gradients_are_those_of_the_layer(what):
    original = MAKERS[what]()
    x = torch.randn(2, 4, 7, dtype=next(original.parameters()).dtype)

    def gradients():
        original.zero_grad()
        given = x.clone().requires_grad_()
        original(given).square().sum().backward()
        return [given.grad, *(one.grad for one in original.parameters())]

    expected = gradients()
    assert int(convert(original)) == 1
    for got, want in zip(gradients(), expected, strict=True):
        assert got is want is None or torch.equal(got, want)


def test_hooks_stay():
    module, seen = layer(), []
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    module.register_state_dict_pre_hook(lambda *_: seen.append("state"))
    module._register_state_dict_hook(lambda *_: seen.append("state made"))
    module.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    convert(module)
    module(torch.randn(1, 4, 5, requires_grad=True)).sum().backward()
    module.load_state_dict(module.state_dict())
    assert seen == ["before", "after", "backward", "state", "state made", "loaded"]


def test_parametrizations_can_be_removed_as_before():
    module, plain = rescaled_bias(layer()), layer(Initialised)
    parametrizations.weight_norm(plain)
    x = torch.randn(1, 4, 5)
    for one, left in ((module, numba_tconv.ConvTranspose1d), (plain, Initialised)):
        expected = one(x)
        convert(one)
        for name in [*one.parametrizations]:
            parametrize.remove_parametrizations(one, name)
        assert isinstance(one, left)
        assert isinstance(one, numba_tconv.ConvTranspose1d)
        assert not parametrize.is_parametrized(one)
        torch.testing.assert_close(one(x), expected)


def test_a_copy_that_shares_a_parametrized_class_stays_torchs():
    module = parametrizations.weight_norm(layer())
    other = copy.deepcopy(module)
    assert type(other) is type(module)
    convert(module)
    assert not isinstance(other, numba_tconv.ConvTranspose1d)
    assert torch.equal(other(x := torch.randn(1, 4, 5)), module(x))


@pytest.mark.parametrize("cls", [nn.ConvTranspose1d, Initialised])
def test_a_converted_layer_is_copied_and_saved(cls):
    module = nn.Sequential(layer(cls))
    convert(module)
    x, file = torch.randn(1, 4, 5), io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)
    for one in copies:
        assert type(one[0]) is type(module[0])
        assert one[0].weight is not module[0].weight
        assert torch.equal(one(x), module(x))


def test_a_parametrized_layer_is_copied_and_refuses_to_be_pickled_as_in_torch():
    for cls in (nn.ConvTranspose1d, Initialised):
        module = parametrizations.weight_norm(layer(cls))
        convert(module)
        assert torch.equal(copy.deepcopy(module)(x := torch.randn(1, 4, 5)), module(x))
        with pytest.raises(RuntimeError, match="state_dict"):
            pickle.dumps(module)


def test_a_shared_layer_is_replaced_once_and_stays_shared(calls):
    shared = nn.ConvTranspose1d(4, 4, 3)
    model = nn.ModuleDict(
        {"a": shared, "b": nn.Sequential(shared, nn.Conv1d(4, 4, 1)), "c": nn.ConvTranspose1d(4, 2, 1)}
    )
    done = convert(model)
    assert (done.replaced, done.left) == (2, {})
    assert model["a"] is model["b"][0] is shared
    model["b"](torch.randn(1, 4, 5))
    assert calls == [4]


def test_a_subclass_keeps_its_class_and_methods():
    module = layer(Initialised)
    convert(module)
    assert isinstance(module, Initialised)
    assert (type(module).__module__, type(module).__qualname__) == (__name__, "Initialised")
    assert repr(module).startswith("Initialised(initialised, 4, 6")
    assert type(module).forward is numba_tconv.ConvTranspose1d.forward


def test_a_class_that_calls_torchs_constructor_by_name_makes_more_layers():
    module = layer(ByName)
    convert(module)
    other = layer(type(module))
    other.load_state_dict(module.state_dict())
    x = torch.randn(1, 4, 5)
    assert torch.equal(other(x), module(x))


def test_converting_again_changes_nothing():
    model = nn.Sequential(
        layer(), layer(Initialised), parametrizations.weight_norm(layer()), numba_tconv.ConvTranspose1d(4, 4, 3)
    )
    assert int(convert(model)) == 3
    classes = [type(one) for one in model]
    assert (convert(model).replaced, convert(model).left) == (0, {})
    assert [type(one) for one in model] == classes


def replaced_forward():
    module = layer()
    module.forward = lambda x: x
    return module


def reflecting():
    module = layer()
    module.padding_mode = "reflect"
    return module


class Named(nn.Module):
    pass


Named.__name__ = "ConvTranspose1d"
LEFT = {
    "own forward": (lambda: layer(OwnForward), "its class OwnForward has a forward of its own"),
    "own forward below": (lambda: layer(UnderOwnForward), "its class UnderOwnForward has a forward of its own"),
    "own forward, parametrized": (
        lambda: parametrizations.weight_norm(layer(OwnForward)),
        "its class ParametrizedOwnForward has a forward of its own",
    ),
    "lazy": (lambda: nn.LazyConvTranspose1d(6, 3), "it is lazy: convert it after its first call"),
    "forward on the layer": (replaced_forward, "its forward was replaced on the layer itself"),
    "own output_padding": (lambda: layer(OwnOutputPadding), "its _output_padding is not torch's"),
    "padding mode": (reflecting, "its padding_mode is 'reflect'"),
    "attribute": (lambda: layer(Own), "it has an attribute 'precision' of its own"),
    "method": (lambda: layer(Unfreezing), "it has an attribute '_unfreeze' of its own"),
    "final": (lambda: layer(Final), "its class Final takes no other base: Final is final"),
    "same name": (Named, "it is no torch.nn.ConvTranspose1d but a "),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_is_reported_with_the_reason(what):
    make, reason = LEFT[what]
    model = nn.Sequential(layer(), make())
    cls, attributes = type(model[1]), vars(model[1]).keys()
    done = convert(model)
    assert done.replaced == 1
    assert done.left.keys() == {"1"}
    assert done.left["1"].startswith(reason)
    assert str(done).splitlines() == ["1 replaced, 1 left", f"1: {done.left['1']}"]
    assert type(model[1]) is cls
    assert vars(model[1]).keys() == attributes


def test_a_scripted_layer_is_reported():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(torch.jit.script(layer()))
    assert convert(model).left["0"].startswith("it is no torch.nn.ConvTranspose1d but a torch.jit")


def test_a_lazy_layer_is_converted_after_its_first_call():
    module = nn.LazyConvTranspose1d(6, 3)
    x = torch.randn(1, 4, 5)
    expected = module(x)
    assert int(convert(module)) == 1
    assert torch.equal(module(x), expected)


def test_the_model_itself_may_be_left():
    assert "the model itself: its class OwnForward" in str(convert(layer(OwnForward)))


@pytest.mark.parametrize("norm", [None, old_weight_norm, parametrizations.weight_norm], ids=["plain", "old", "new"])
@pytest.mark.parametrize(("cls", "x"), [(Cropping, (2, 4, 7)), (Squeezing, (4, 7))], ids=["crops", "squeezes"])
def test_a_forward_that_calls_torchs_gets_this_packages(cls, x, norm, calls):
    module = layer(cls)
    module = norm(module) if norm else module
    x = torch.randn(x)
    expected = module(x)
    assert (int(convert(module)), calls) == (1, [])
    assert torch.equal(module(x), expected)
    assert calls == [6]
    assert isinstance(module, cls)
    if norm is not parametrizations.weight_norm:  # torch does not pickle it
        with torch.no_grad():
            module(x)  # the old weight_norm leaves a weight without a graph
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            calls.clear()
            assert torch.equal(other(x), expected)
            assert calls == [6]


@pytest.mark.parametrize("what", [None, torch.zeros(1), nn.ConvTranspose1d])
def test_only_modules_are_converted(what):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not "):
        convert(what)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("what", MAKERS)
def test_a_converted_layer_on_the_gpu_is_as_close_to_float64_as_torchs(what, calls):
    module = MAKERS[what]().cuda()
    dtype = next(module.parameters()).dtype
    x = torch.randn(2, 4, 7, dtype=dtype, device="cuda")
    with bench.torch_switches(tf32=False):
        outputs = {"torch": module(x)}
        convert(module)
        outputs["ours"] = module(x)
    assert calls == [6]
    problem = Problem(**SIZES, batch=2, length=7, bias=module.bias is not None)
    operands = Operands(x, module.weight, module.bias)
    found = accuracy.errors(outputs, operands, problem)
    assert accuracy.right("forward", found["ours"], found["torch"], operands, "ieee", problem)
