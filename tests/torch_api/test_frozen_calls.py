"""Calls that a frozen layer remembers serve calls like them, and no others."""

import copy
import pickle

import pytest
import torch

import numba_tconv
from numba_tconv.torch_api import freeze as module
from numba_tconv.torch_api import functional

pytest_plugins = ["tests.around"]
pytestmark = pytest.mark.usefixtures("made_ready")


@pytest.fixture
def asked(monkeypatch):
    """The arguments of each search for a call."""
    found, at_once = [], functional.at_once

    def noted(*arguments):
        found.append(arguments)
        return at_once(*arguments)

    monkeypatch.setattr(functional, "at_once", noted)
    return found


def frozen_layer(**choices):
    layer = numba_tconv.ConvTranspose1d(4, 6, 4, stride=2, **{"padding": 1, "groups": 2, **choices}).eval()
    numba_tconv.freeze(layer)
    return layer


def signal(length=9, batch=2):
    return torch.randn(batch, 4, length)


def outcome(layer, x):
    try:
        return layer(x)
    except Exception as error:
        return type(error), str(error)


def assert_as_never_called(layer, x):
    """``layer`` gives what a copy does that remembers nothing."""
    other = copy.deepcopy(layer)
    assert other._frozen is None
    found, expected = outcome(layer, x), outcome(other, x)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize("choices", [{}, {"bias": False}, {"padding": "causal"}, {"padding": (1, 0)}], ids=str)
def test_alike_calls_are_searched_once(asked, choices):
    layer, x = frozen_layer(**choices), signal()
    for _ in range(3):
        with torch.no_grad():
            layer(x)
    assert len(asked) == 1
    assert_as_never_called(layer, x)


def padded(x):
    return torch.nn.functional.pad(x, (0, 1))[..., :-1]


def moved(x):
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


INPUTS = {
    "length": lambda x: x[..., :-1].contiguous(),
    "batch": lambda x: x[:1],
    "stride": padded,
    "place in memory": moved,
    "dtype": torch.Tensor.double,
    "channels": lambda x: x[:, :3].contiguous(),
    "no batch": lambda x: x[0],
    "negative view": lambda x: torch._neg_view(x),
    "subclass": lambda x: x.as_subclass(type("Sub", (torch.Tensor,), {})),
    "gradient wanted": lambda x: x.clone().requires_grad_(),
    "no tensor": lambda x: x.tolist(),
}


@pytest.mark.parametrize("what", INPUTS)
def test_another_input_is_no_call_like_it(asked, what):
    layer, x = frozen_layer(), signal()
    with torch.no_grad():
        layer(x)
        del asked[:]
        other = INPUTS[what](x)
        outcome(layer, other)
        assert bool(asked) == (what != "gradient wanted")  # none is wanted under no_grad
        assert_as_never_called(layer, other)


CHOICES = {
    "stride": (3,),
    "padding": (2,),
    "output_padding": (1,),
    "groups": 1,
    "dilation": (2,),
    "variant": "k1_gather",
    "precision": "ieee",
    "precision, unknown": "tf23",
    "padding_mode": "reflect",
    "stride, a float": (2.0,),
    "padding, a list": [1],
    "padding, a number": 1,
    "padding, a bool": (True,),
    "groups, a float": 2.0,
}


@pytest.mark.parametrize("what", CHOICES)
def test_a_changed_layer_forgets(what):
    layer, x = frozen_layer(), signal()
    with torch.no_grad():
        layer(x)
        setattr(layer, what.partition(",")[0], CHOICES[what])
        for _ in range(2):
            assert_as_never_called(layer, x)


def test_torchs_switch_is_asked_at_every_call(made_ready, monkeypatch):
    layer, x = frozen_layer(), signal()
    for allowed in (False, True, False, True):
        monkeypatch.setattr(functional, "torch_allows_tf32", lambda allowed=allowed: allowed)
        with torch.no_grad():
            layer(x)
    assert [what[-1] for _, what in made_ready] == ["ieee", functional.TF32_ALLOWED]


def test_what_changes_the_weights_is_seen():
    layer, x = frozen_layer(), signal()
    with torch.no_grad():
        before = layer(x)
        layer.weight = torch.nn.Parameter(2 * layer.weight)
        assert not torch.equal(layer(x), before)
        assert_as_never_called(layer, x)
    numba_tconv.freeze(layer)
    with torch.no_grad():
        layer(x)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert layer._frozen is None


def test_output_size_and_autocast_are_heard():
    layer, x = frozen_layer(), signal()
    with torch.no_grad():
        layer(x)
        assert layer(x, output_size=[19]).shape[-1] == 19
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match=r"got torch\.bfloat16"):
            layer(x)  # the weights are cast; a GPU's input would be, too


def test_so_many_calls_are_remembered_and_no_more(monkeypatch):
    monkeypatch.setattr(module, "MOST_CALLS", 2)
    layer = frozen_layer()
    with torch.no_grad():
        for length in (5, 6, 7, 8):
            layer(signal(length))
            assert_as_never_called(layer, signal(length))
            assert len(layer._frozen._calls) <= 2


def test_a_renamed_parameter_is_missed():
    layer, x = frozen_layer(), signal()
    with torch.no_grad():
        layer(x)
        layer.register_parameter("offset", layer._parameters.pop("bias"))
        assert_as_never_called(layer, x)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_hook_that_another_thread_restores_still_computes():
    layer = torch.nn.utils.weight_norm(numba_tconv.ConvTranspose1d(4, 6, 4)).eval()
    numba_tconv.freeze(layer)
    (hook,) = layer._forward_pre_hooks.values()
    held = type(hook).__call__
    numba_tconv.unfreeze(layer)
    before = layer.weight
    held(hook, layer, ())
    assert layer.weight is not before


def test_weights_that_are_saved_for_a_gradient_can_be_pickled():
    layer, x = frozen_layer().requires_grad_(False), signal().requires_grad_()
    numba_tconv.freeze(layer)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    with torch.autograd.graph.saved_tensors_hooks(pickle.dumps, pickle.loads):
        y = layer(x)
    assert layer._frozen is not None
    assert torch.equal(*torch.autograd.grad(y.sum(), x), expected)
