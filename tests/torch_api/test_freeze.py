"""``freeze``: equal results, nothing computed twice, and every way in which it ends."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

import numba_tconv
from numba_tconv import convert, freeze, unfreeze

X = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0))


def plain():
    torch.manual_seed(1)
    return numba_tconv.ConvTranspose1d(4, 6, 5, stride=3, padding=1).eval()


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(plain())


def old_spectral_norm():
    return nn.utils.spectral_norm(plain().train()).eval()


def rescaled_bias():
    nn.utils.parametrize.register_parametrization(layer := plain(), "bias", nn.Tanh())
    return layer


KINDS = {
    "plain": plain,
    "weight_norm, the old spelling": old_weight_norm,
    "weight_norm": lambda: parametrizations.weight_norm(plain()),
    "spectral_norm, the old spelling": old_spectral_norm,
    "spectral_norm": lambda: parametrizations.spectral_norm(plain()).eval(),
    "orthogonal": lambda: parametrizations.orthogonal(plain()).eval(),
    "a parametrized bias": rescaled_bias,
    "pruned": lambda: prune.l1_unstructured(plain(), "weight", amount=0.5),
    "without a bias": lambda: numba_tconv.ConvTranspose1d(4, 6, 5, bias=False).eval(),
}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def called(layer, x=X):
    with torch.no_grad():
        return layer(x)


def is_frozen(layer):
    return layer._frozen is not None


@kinds
def test_a_frozen_layer_gives_the_same_numbers(make):
    layer = make()
    keys, names = list(layer.state_dict()), [name for name, _ in layer.named_parameters()]
    expected = called(layer)
    report = freeze(layer)
    assert (int(report), report.left) == (1, {})
    for _ in range(2):
        assert torch.equal(called(layer), expected)
        with torch.inference_mode():
            assert torch.equal(layer(X), expected)
    assert is_frozen(layer)
    assert list(layer.state_dict()) == keys
    assert [name for name, _ in layer.named_parameters()] == names
    assert unfreeze(layer) == 1
    assert unfreeze(layer) == 0
    assert torch.equal(called(layer), expected)


@pytest.mark.parametrize(
    ("make", "cls"), [(old_weight_norm, WeightNorm), (old_spectral_norm, SpectralNorm)], ids=["weight", "spectral"]
)
def test_a_hook_that_computes_the_weight_rests_while_the_layer_is_frozen(make, cls, monkeypatch):
    computed, compute = [], cls.compute_weight
    monkeypatch.setattr(cls, "compute_weight", lambda *args, **kw: computed.append(1) or compute(*args, **kw))
    layer = make()
    freeze(layer)
    computed.clear()
    called(layer)
    assert not computed
    unfreeze(layer)
    called(layer)
    assert computed == [1]
    (hook,) = layer._forward_pre_hooks.values()
    assert type(hook) is cls


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parametrization_rests_while_the_layer_is_frozen(name):
    layer, computed = parametrizations.weight_norm(plain(), name), []
    layer.parametrizations[name][0].register_forward_hook(lambda *_: computed.append(1))
    freeze(layer)
    computed.clear()
    called(layer)
    assert not computed


@pytest.mark.parametrize("name", [name for name in KINDS if "old" in name or name == "pruned"])
def test_a_tensor_that_a_hook_sets_is_computed_anew(name):
    """The hook's last result predates parameters that were loaded since."""
    layer, loaded = KINDS[name](), KINDS[name]()
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(torch.rand_like(parameter))
    layer.load_state_dict(loaded.state_dict())
    expected = called(loaded)
    assert int(freeze(layer)) == 1
    assert torch.equal(called(layer), expected)


def test_a_weight_that_is_computed_in_an_unknown_way_is_left():
    layer = plain()
    scale, weight = nn.Parameter(torch.ones(())), layer.weight
    del layer.weight
    layer.scale, layer.original = scale, weight
    layer.register_forward_pre_hook(lambda module, _: setattr(module, "weight", module.scale * module.original))
    called(layer)
    report = freeze(layer)
    assert report.left == {"": "its weight is neither a parameter nor computed by a known hook"}
    with torch.no_grad():
        before = called(layer)
        scale.mul_(2)
    assert not torch.equal(called(layer), before)


def test_own_hooks_still_run():
    layer, seen = plain(), []
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_hook(lambda *_: seen.append("after"))
    freeze(layer)
    called(layer)
    assert seen == ["before", "after"]


def test_weight_norm_can_be_removed_from_a_frozen_layer():
    layer = old_weight_norm()
    expected = called(layer)
    freeze(layer)
    nn.utils.remove_weight_norm(layer)
    assert torch.equal(called(layer), expected)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert not torch.equal(called(layer), expected)


ENDINGS = {
    "train": lambda layer, x: layer.train(),
    "train and back": lambda layer, x: layer.train().eval(),
    "the flag": lambda layer, x: setattr(layer, "training", True),
    "in a container": lambda layer, x: nn.Sequential(layer).train(),
    "load_state_dict": lambda layer, x: layer.load_state_dict(layer.state_dict()),
    "assignment": lambda layer, x: layer.load_state_dict(
        {name: value.clone() for name, value in layer.state_dict().items()}, assign=True
    ),
    "to another dtype and back": lambda layer, x: layer.double().float(),
    "to its device": lambda layer, x: layer.to("cpu"),
    "requires_grad_": lambda layer, x: layer.requires_grad_(False),
    "a gradient wanted": lambda layer, x: layer(x),
    "unfreeze": lambda layer, x: unfreeze(layer),
}


@pytest.mark.parametrize("end", ENDINGS)
@pytest.mark.parametrize("make", [plain, old_weight_norm, KINDS["weight_norm"]], ids=["plain", "old", "new"])
def test_what_ends_it(make, end):
    """Afterwards a write to the weights is seen; while the layer is frozen it is not."""
    layer = make()
    freeze(layer)
    called(layer)
    ENDINGS[end](layer, X)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.data.mul_(1.5)
    y, other = called(layer), plain()  # in the call the old weight_norm's hook sets the weight
    other.weight, other.bias = nn.Parameter(layer.weight.detach()), layer.bias
    assert torch.allclose(y, called(other))
    assert not is_frozen(layer)


@pytest.mark.parametrize("make", [old_weight_norm, KINDS["weight_norm"]], ids=["old", "new"])
def test_a_write_to_a_frozen_layer_is_not_seen_before_it_is_frozen_anew(make):
    layer = make()
    freeze(layer)
    before = called(layer)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "bias" not in name:
                parameter.mul_(3)
    assert torch.equal(called(layer), before)
    unfreeze(layer)
    freeze(layer)
    assert not torch.equal(called(layer), before)


def test_the_gradient_for_the_input_is_that_of_the_layer():
    layer = plain()
    layer.requires_grad_(False)
    wanted, frozen = X.clone().requires_grad_(), X.clone().requires_grad_()
    layer(wanted).square().sum().backward()
    freeze(layer)
    layer(frozen).square().sum().backward()
    assert is_frozen(layer)
    assert torch.equal(frozen.grad, wanted.grad)


class Cubed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones((), requires_grad=True))

    def forward(self, weight):
        return self.scale * weight @ weight.mT @ weight


def cubed():
    nn.utils.parametrize.register_parametrization(layer := plain().requires_grad_(False), "weight", Cubed())
    return layer


def test_a_gradient_wanted_for_a_buffer_ends_it():
    freeze(layer := cubed())
    layer(X).sum().backward()
    assert layer.parametrizations.weight[0].scale.grad is not None
    assert not is_frozen(layer)


def test_autocast_does_not_round_what_freezing_computes():
    expected = called(layer := cubed())
    with torch.autocast("cpu", torch.bfloat16):
        freeze(layer)
    assert torch.equal(called(layer), expected)


def test_a_replaced_parameter_is_used():
    layer = plain()
    freeze(layer)
    layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
    assert torch.equal(called(layer), layer.bias.detach()[:, None].expand_as(called(layer)))


@pytest.mark.parametrize("change", ["another", "a second", "replaced"])
def test_a_changed_parametrization_is_used(change):
    layer = rescaled_bias()
    freeze(layer)
    called(layer)
    if change == "another":
        nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh())
    elif change == "a second":
        nn.utils.parametrize.register_parametrization(layer, "bias", nn.Softplus())
    else:
        layer.parametrizations.bias[0] = nn.Softplus()
    expected = torch.conv_transpose1d(X, layer.weight, layer.bias, layer.stride, layer.padding)
    torch.testing.assert_close(called(layer), expected.detach())


def test_functional_call_takes_the_parameters_that_it_is_given():
    layer = old_weight_norm()
    freeze(layer)
    before = called(layer)
    given = {name: 2 * value.detach() for name, value in layer.named_parameters()}
    with torch.no_grad():
        assert torch.allclose(torch.func.functional_call(layer, given, (X,)), 2 * before)
    assert torch.equal(called(layer), before)
    assert is_frozen(layer)


@kinds
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), copy.copy])
def test_copies_are_not_frozen(make, copied):
    layer = make()
    freeze(layer)
    expected = called(layer)
    try:
        other = copied(layer)
    except RuntimeError as error:  # torch pickles no parametrized layer
        pytest.skip(str(error))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.data.add_(torch.rand_like(parameter))
    other.train(False)
    assert not torch.allclose(called(other), expected)
    assert is_frozen(layer)


def test_a_replica_for_data_parallel_is_not_frozen():
    layer = plain()
    freeze(layer)
    replica = layer._replicate_for_data_parallel()
    replica._parameters = {name: 2 * value.detach() for name, value in layer._parameters.items()}
    assert torch.allclose(called(replica), 2 * called(layer))


def test_autocast_casts_the_weights_once():
    layer = plain()
    with torch.autocast("cpu", torch.bfloat16):
        expected = called(layer)
        freeze(layer)
        assert torch.equal(called(layer), expected)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        cast, again = layer._frozen.operands(layer), layer._frozen.operands(layer)
    assert cast[0].dtype == torch.bfloat16
    assert cast[0] is again[0]
    assert called(layer).dtype == torch.float32


COMPILERS = {
    "torch.compile": lambda layer, x: torch.compile(layer, backend="eager", fullgraph=True),
    "torch.jit.trace": lambda layer, x: torch.jit.trace(layer, x),
    "torch.fx": lambda layer, x: torch.fx.symbolic_trace(nn.Sequential(layer)),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("make", [plain, old_weight_norm, KINDS["weight_norm"]], ids=["plain", "old", "new"])
def test_compiled_code_takes_the_parameters_as_they_are(make, compiler):
    layer = make()
    if compiler == "torch.fx" and nn.utils.parametrize.is_parametrized(layer):
        pytest.skip("torch.fx calls the layer itself")
    freeze(layer)
    with torch.no_grad():
        compiled = COMPILERS[compiler](layer, X)
    assert torch.allclose(called(compiled), called(layer))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1.5)
    assert torch.allclose(called(compiled), called(copy.deepcopy(layer)))
    unfreeze(layer)
    assert torch.allclose(called(compiled), called(layer))


def test_what_is_kept_goes_with_the_layer():
    gc.disable()  # reference counts alone must free it
    try:
        layer = KINDS["weight_norm"]()
        report = freeze(layer)
        assert report.bytes == layer.weight.nbytes
        with torch.no_grad():
            kept = weakref.ref(layer._frozen.operands(layer)[0])
        assert kept() is not None
        unfreeze(layer)
        assert kept() is None
    finally:
        gc.enable()


def test_only_in_eval_mode_and_all_or_nothing():
    model = nn.Sequential(plain(), plain().train()).eval()
    model[1].train()
    with pytest.raises(RuntimeError, match=r"1 is in train mode: call eval\(\)"):
        freeze(model)
    assert not is_frozen(model[0])
    torchs = nn.Sequential(nn.ConvTranspose1d(4, 6, 5))
    with pytest.raises(RuntimeError, match="the model is in train mode"):
        convert(torchs, freeze=True)
    assert not isinstance(torchs[0], numba_tconv.ConvTranspose1d)


@pytest.mark.parametrize("function", [freeze, unfreeze])
def test_no_module(function):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not list"):
        function([])


def test_the_report():
    shared = plain()
    model = nn.Sequential(shared, shared, nn.Sequential(nn.ConvTranspose1d(6, 6, 3)), nn.ReLU()).eval()
    report = freeze(model)
    frozen = shared._frozen
    assert report == freeze(model)
    assert shared._frozen is frozen
    assert report.frozen == 1
    assert report.bytes == 0
    assert report.left == {"2.0": "it is torch's layer: convert it first"}
    assert str(report).splitlines()[0] == "1 frozen, 0 bytes beside their parameters, 1 left"
    conversion = convert(model, freeze=True)
    assert (int(conversion), int(conversion.freezing)) == (1, 2)
    assert "2 frozen" in str(conversion)
    assert int(freeze(nn.Linear(1, 1).eval())) == 0


def test_a_layer_of_a_class_of_its_own_is_reported():
    class Own(nn.ConvTranspose1d):
        pass

    assert freeze(Own(6, 6, 3).eval()).left == {"": "it is torch's layer: convert it first"}
