"""Calls found by one look-up: a remembered call serves calls like it, and no others."""

import pytest
import torch

import numba_tconv
from numba_tconv.formula.precision import TF32_ALLOWED
from numba_tconv.torch_api import functional, sizes
from tests.around import PROBLEM, READY, assert_same, call, tensors_of
from tests.parity import parameters

pytest_plugins = ["tests.around"]
pytestmark = pytest.mark.usefixtures("made_ready")


def test_calls_that_are_alike_are_made_ready_once(made_ready):
    for _ in range(3):
        call(*tensors_of(PROBLEM)).sum().backward()
    assert sorted(name for name, _ in made_ready) == sorted(READY)


def test_gradients_that_nobody_wants_are_not_made_ready(made_ready):
    x, w, bias = tensors_of(PROBLEM)
    call(x.detach(), w, bias).sum().backward()
    call(x, w.detach(), bias.detach()).sum().backward()
    assert [name for name, _ in made_ready][1:] == ["ready_weight", "ready_bias", "ready_input"]


def padded(tensor):
    return torch.nn.functional.pad(tensor, (0, 1))[..., :-1]


def moved(tensor):
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


# Differences that make another call: in tensors, and in other arguments.
OTHER = {
    "stride of input": lambda x, w, bias: ((padded(x), w, bias), {}),
    "stride of weight": lambda x, w, bias: ((x, padded(w), bias), {}),
    "stride of bias": lambda x, w, bias: ((x, w, bias.repeat_interleave(2)[::2]), {}),
    "place of input in memory": lambda x, w, bias: ((moved(x), w, bias), {}),
    "place of weight in memory": lambda x, w, bias: ((x, moved(w), bias), {}),
    "length": lambda x, w, bias: ((x[..., :-1].contiguous(), w, bias), {}),
    "batch": lambda x, w, bias: ((x[:1], w, bias), {}),
    "kernel size": lambda x, w, bias: ((x, w[..., :-1].contiguous(), bias), {}),
    "no bias": lambda x, w, bias: ((x, w), {}),
    "dtype": lambda x, w, bias: ((x.float(), w.float(), bias.float()), {}),
    **{name: lambda x, w, bias, name=name: ((x, w, bias), {name: 3}) for name in ("stride", "padding", "dilation")},
    **{str(one): lambda x, w, bias, one=one: ((x, w, bias), {"padding": one}) for one in ("causal", (0, 1), (1, 0))},
    "output_padding": lambda x, w, bias: ((x, w, bias), {"output_padding": 1}),
    "precision": lambda x, w, bias: ((x, w, bias), {"precision": "fp64"}),
    "variant": lambda x, w, bias: ((x, w, bias), {"variant": "k1_gather"}),
}


@pytest.mark.parametrize("what", OTHER)
def test_other_calls_are_made_ready_for_themselves(made_ready, by_operator, what):
    tensors = tensors_of(PROBLEM, requires_grad=False)
    numba_tconv.conv_transpose1d(*tensors, **parameters(PROBLEM))
    others, arguments = OTHER[what](*tensors)
    arguments = {**parameters(PROBLEM), **arguments}

    def compute():
        return [numba_tconv.conv_transpose1d(*others, **arguments) for _ in range(2)]

    found = compute()
    assert len(made_ready) == 2
    assert_same(found, by_operator(compute))


@pytest.mark.parametrize("padding", ["valid", "same", "causal", (1, 0), (0, 1), (3, -1)], ids=str)
def test_a_pair_or_a_word_is_remembered(made_ready, padding):
    sizes = parameters(PROBLEM) | {"padding": padding}
    layer = numba_tconv.ConvTranspose1d(4, 6, 4, 2, padding=padding, groups=2)
    tensors = tensors_of(PROBLEM, requires_grad=False)
    x = tensors[0].float()
    first, of_layer = numba_tconv.conv_transpose1d(*tensors, **sizes), layer(x)
    count, known = len(made_ready), functional._call.cache_info().hits
    assert_same([first, of_layer], [numba_tconv.conv_transpose1d(*tensors, **sizes), layer(x)])
    assert len(made_ready) == count == 2
    assert functional._call.cache_info().hits == known + 2


@pytest.mark.usefixtures("made_ready")
@pytest.mark.parametrize("padding", [(-1, 0), (2, -9), (-3, -20)], ids=str)
def test_outputs_around_the_signal_are_there_at_each_call(by_operator, padding):
    tensors, sizes = tensors_of(PROBLEM, requires_grad=False), parameters(PROBLEM) | {"padding": padding}

    def compute():
        return [numba_tconv.conv_transpose1d(*tensors, **sizes) for _ in range(2)]

    assert_same(compute(), by_operator(compute))


def test_torchs_switch_is_asked_at_every_call(made_ready, monkeypatch):
    tensors = [tensor.float() for tensor in tensors_of(PROBLEM, requires_grad=False)]
    for allowed in (False, True, False, True):
        monkeypatch.setattr(functional, "torch_allows_tf32", lambda allowed=allowed: allowed)
        call(*tensors)
    assert [what[-1] for _, what in made_ready] == ["ieee", TF32_ALLOWED]
    call(*(tensor.double() for tensor in tensors))
    assert made_ready[-1][1][-1] == "fp64"


EQUAL = {
    "a float": {"stride": 1.0},
    "a bool": {"stride": True},
    "floats": dict.fromkeys(sizes.INTEGERS, 1.0) | {"padding": 0.0, "output_padding": 0.0},
    "bools": dict.fromkeys(sizes.INTEGERS, True) | {"padding": False, "output_padding": False},
    "a bool in a tuple": {"stride": (True,), "padding": (0,), "output_padding": (0,), "dilation": (1,)},
    "a float in a tuple": {"stride": (1,), "padding": (0.0,), "output_padding": (0,), "dilation": (1,)},
    "a pair in a tuple": {"stride": (1,), "padding": ((0, 0),), "output_padding": (0,), "dilation": (1,)},
    "a word in a tuple": {"stride": (1,), "padding": ("valid",), "output_padding": (0,), "dilation": (1,)},
    "groups, a float": {"groups": 1.0},
    "groups in a tuple": {"groups": (1,)},
    "two numbers": {"stride": (1, 1)},
    "no number": {"stride": ()},
    "precision, the switch's": {"precision": TF32_ALLOWED},
    "precision, no name": {"precision": True},
    "precision, not to be looked up": {"precision": ["ieee"]},
    "variant, empty": {"variant": ""},
}


@pytest.mark.parametrize("what", EQUAL)
def test_what_is_equal_to_a_good_argument_need_not_be_one(by_operator, what):
    x, w = torch.randn(2, 4, 7), torch.randn(4, 6, 3)
    numba_tconv.conv_transpose1d(x, w)
    numba_tconv.conv_transpose1d(x, w, stride=(1,), padding=(0,), output_padding=(0,), dilation=(1,))

    def raised():
        with pytest.raises(Exception) as error:  # noqa: PT011  (its type is compared)
            numba_tconv.conv_transpose1d(x, w, **EQUAL[what])
        return type(error.value), str(error.value)

    assert raised() == by_operator(raised)


@pytest.mark.parametrize(("batch", "channels"), [(0, 6), (2, 0)], ids=["no samples", "no channels"])
def test_an_output_without_elements_is_torchs(made_ready, batch, channels):
    def outcome(function):
        try:
            return function(torch.randn(batch, 4, 7), torch.randn(4, channels, 3)).shape
        except RuntimeError as error:
            return str(error)

    assert outcome(numba_tconv.conv_transpose1d) == outcome(torch.conv_transpose1d)
    assert not made_ready


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool], ids=str)
def test_what_no_rung_computes_is_torchs(made_ready, monkeypatch, dtype):
    monkeypatch.setattr(functional, "_ours", lambda *_: False)
    tensors = [tensor.to(dtype) for tensor in tensors_of(PROBLEM, requires_grad=False)]

    def outcome(function):
        try:
            return function(*tensors, **parameters(PROBLEM))
        except RuntimeError as error:
            return type(error), str(error)

    ours, theirs = outcome(numba_tconv.conv_transpose1d), outcome(torch.conv_transpose1d)
    assert torch.equal(ours, theirs) if torch.is_tensor(theirs) else ours == theirs
    assert not made_ready
