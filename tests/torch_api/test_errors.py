"""Hundreds of bad and odd calls: refusals have torch's type, accepted calls have torch's result.

The CUDA path's checks read shapes, dtypes and values only, so CPU tensors serve: `_ours`, which decides who computes,
accepts them. torch's own function is watched.
"""

import itertools

import numpy as np
import pytest
import torch

import numba_tconv
from numba_tconv.formula.problem import Problem
from numba_tconv.runtime.device import H200
from numba_tconv.selection.registry import RUNGS
from numba_tconv.torch_api import functional
from numba_tconv.torch_api import operators as ops
from tests.thorough import thorough

TORCHS = torch.conv_transpose1d
INTEGERS = ("stride", "padding", "output_padding", "groups", "dilation")


def outcome(function, arguments):
    """The call's result or exception."""
    try:
        return function(*arguments.get("positional", ()), **{k: v for k, v in arguments.items() if k != "positional"})
    except Exception as error:  # any: types are compared
        return error


class Watched:
    """torch's function, which remembers whether it was called."""

    def __init__(self):
        self.reached = False

    def __call__(self, *args, **kwargs):
        self.reached = True
        return TORCHS(*args, **kwargs)


@pytest.fixture
def watched(monkeypatch):
    watched = Watched()
    monkeypatch.setattr(torch, "conv_transpose1d", watched)
    return watched


@pytest.fixture
def taken(monkeypatch):
    """CPU tensors of the kernels' dtypes go through the operator, as CUDA tensors do."""
    decide = functional._ours

    class OnCuda:
        """An input as `_ours` sees it, with one answer changed."""

        is_cuda = True

        def __init__(self, tensor):
            self.dtype, self.layout = tensor.dtype, tensor.layout

    monkeypatch.setattr(functional, "_ours", lambda input, weight, bias: decide(OnCuda(input), weight, bias))


def agree(arguments, watched, named=(), delegated=False):
    """Check that our outcome is torch's; a refusal is ours, and mentions one of ``named``."""
    theirs, ours = outcome(TORCHS, arguments), outcome(numba_tconv.conv_transpose1d, arguments)
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor), f"torch accepts it, we raise {ours!r}"
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
        return
    assert type(ours) is type(theirs), f"torch raises {theirs!r}, ours is {ours!r}"
    # torch's backends differ on outputs without samples, so torch decides.
    if not delegated and "Output size is too small" not in str(theirs):
        assert not watched.reached, f"only torch refused it: {theirs}"
        assert any(name in str(ours) for name in named), f"{ours} names none of {named}"


def call(x_shape=(2, 4, 7), w_shape=(4, 6, 3), bias_shape=None, dtype=torch.float32, **arguments):
    tensors = {"input": torch.randn(x_shape).to(dtype), "weight": torch.randn(w_shape).to(dtype)}
    if bias_shape is not None:
        tensors["bias"] = torch.randn(bias_shape).to(dtype)
    return tensors | arguments


ODD_INTEGERS = [
    *(True, False, None, 1.0, "1", "same", 1j, 0, -1, -(2**62), 2**70, -(2**70)),
    *((), [], (1,), [1], (1, 1), [1, 2, 1], (-1,), (0,), torch.Size([1]), range(1, 2), {1}, {1: 1}),
    *((1.0,), (None,), ("a",), ([1],), (True,), (1, 1.0), (1, None)),
    *(np.int64(1), np.int8(1), np.float64(1), np.bool_(True), np.array([1]), np.array([1, 1]), (np.int64(1),)),
    *(torch.tensor(1), torch.tensor([1]), torch.tensor(1.0), torch.tensor([1, 1]), (torch.tensor(1),)),
    *((torch.tensor(1.0),), torch.tensor(1, dtype=torch.int8), torch.tensor(-1), Ellipsis),
]


def is_own(name, value):
    """Whether this package gives ``value`` a meaning that torch does not: test_padding.py."""
    return name == "padding" and (isinstance(value, str) or (type(value) is tuple and value == (1, 1)))


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in INTEGERS for value in ODD_INTEGERS if not is_own(name, value)],
    ids=lambda one: one if isinstance(one, str) else repr(one),
)
def test_odd_integers(name, value, taken, watched):
    base = {"stride": 3} if name == "output_padding" else {}
    agree(call(**base, **{name: value}), watched, named=[name])


GEOMETRIES = list(itertools.product((1, 2, 3), (0, 1, 4, 9), (0, 1, 2, 4), (1, 2, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("stride", "padding", "output_padding", "dilation"), thorough(GEOMETRIES, always=GEOMETRIES[::5])
)
def test_geometry(stride, padding, output_padding, dilation, dtype, taken, watched):
    arguments = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
    agree(call(**arguments, dtype=dtype), watched, named=["output_padding must be smaller", "negative output length"])


NO_OUT_CHANNELS = (4, 0, 3)  # torch takes such a weight on CUDA alone, so torch is asked
SHAPES = {
    "input": [(2, 4, 7), (4, 7), (7,), (), (1, 2, 4, 7), (2, 3, 7), (3, 7), (2, 4, 0), (4, 0), (2, 0, 7)],
    "weight": [(4, 6, 3), (4, 6), (6,), (), (1, 4, 6, 3), NO_OUT_CHANNELS, (4, 6, 0), (0, 6, 3), (5, 6, 3), (3, 6, 3)],
}


BOTH_SHAPES = list(itertools.product(*SHAPES.values()))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("x_shape", "w_shape"), thorough(BOTH_SHAPES, always=BOTH_SHAPES[::3]))
def test_shapes(x_shape, w_shape, groups, taken, watched):
    named = ["input must", "weight must", "channels must", "kernel_size must", "length must"]
    agree(call(x_shape, w_shape, groups=groups), watched, named, delegated=w_shape == NO_OUT_CHANNELS)


@pytest.mark.parametrize("x_shape", [(0, 4, 7), (0, 4, 0), (0, 3, 7), (0, 0, 7), (0, 7), (0, 0)], ids=str)
@pytest.mark.parametrize("w_shape", SHAPES["weight"], ids=str)
@pytest.mark.parametrize("padding", [0, 1, 5])
def test_empty_inputs(x_shape, w_shape, padding, taken, watched):
    """torch decides about empty batches."""
    delegated = len(x_shape) == 3 or w_shape == NO_OUT_CHANNELS
    agree(call(x_shape, w_shape, padding=padding), watched, delegated=delegated, named=["must"])


@pytest.mark.parametrize("groups", [-1, 0, 1, 2, 3, 4, 5, 8, 2**40])
@pytest.mark.parametrize("shapes", [((2, 4, 7), (4, 6, 3)), ((2, 8, 7), (8, 1, 3)), ((2, 6, 7), (6, 2, 3))], ids=str)
@pytest.mark.parametrize("bias", [None, (6,), (12,), (8,)], ids=str)
def test_groups(shapes, groups, bias, taken, watched):
    agree(call(*shapes, bias, groups=groups), watched, named=["groups", "bias must have shape"])


@pytest.mark.parametrize("x_shape", [(2, 4, 7), (4, 7)], ids=str)
@pytest.mark.parametrize("shape", [(6,), (5,), (7,), (1,), (0,), (), (6, 1), (1, 6), (6, 6)], ids=str)
def test_bias_shapes(shape, x_shape, taken, watched):
    agree(call(x_shape, bias_shape=shape), watched, named=["bias"])


@pytest.mark.parametrize("name", ["input", "weight", "bias"])
@pytest.mark.parametrize("value", [None, 3, 3.0, True, "a", [1.0], np.ones((2, 4, 7)), Ellipsis], ids=repr)
def test_not_a_tensor(name, value, taken, watched):
    agree(call() | {name: value}, watched, named=[name])


PAIRS = list(itertools.permutations((torch.float32, torch.float64, torch.float16, torch.bfloat16), 2))


@pytest.mark.parametrize(("dtype", "other"), PAIRS, ids=str)
def test_mixed_dtypes(dtype, other, taken, watched):
    arguments = call(dtype=dtype)
    arguments["weight"] = arguments["weight"].to(other)
    agree(arguments, watched, named=["weight must have the dtype of input"])


@pytest.mark.parametrize(("dtype", "other"), PAIRS, ids=str)
def test_mixed_bias_dtypes(dtype, other, taken, watched):
    arguments = call(bias_shape=(6,), dtype=dtype)
    arguments["bias"] = arguments["bias"].to(other)
    if dtype == torch.float32:
        agree(arguments, watched, named=["bias must have the dtype of input"])
    else:  # torch takes some on the CPU, and none on CUDA
        with pytest.raises(RuntimeError, match="bias must have the dtype of input"):
            numba_tconv.conv_transpose1d(**arguments)
        assert not watched.reached


@pytest.mark.parametrize("name", ["input", "weight", "bias"])
def test_sparse(name, taken, watched):
    arguments = call(bias_shape=(6,))
    arguments[name] = arguments[name].to_sparse()
    agree(arguments, watched, delegated=True)


FOREIGN = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FOREIGN, ids=str)
def test_dtypes_that_only_torch_may_take(dtype, taken, watched):
    agree(call(dtype=dtype, stride=2), watched, delegated=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"input": torch.ones(1, 1, 1)},
        {"weight": torch.ones(1, 1, 1)},
        call() | {"strides": 2},
        {"positional": (torch.ones(1, 1, 1), torch.ones(1, 1, 1), None, 1, 0, 0, 1, 1, 1)},
        {"positional": (torch.ones(1, 1, 1),), "input": torch.ones(1, 1, 1), "weight": torch.ones(1, 1, 1)},
    ],
    ids=["nothing", "no weight", "no input", "unknown keyword", "too many", "twice"],
)
def test_not_the_signature(arguments, taken, watched):
    agree(arguments, watched, named=["argument"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (call(stride=(1, 1)), r"stride must be one integer or a tuple of one, got \(1, 1\)"),
        (call(padding=1.0), "padding must be an integer, not float"),
        (call(groups=True), "groups must be an integer, not bool"),
        (call(dilation=2**70), "dilation must fit in 64 bits"),
        (call((2, 3, 7)), "input must have the 4 channels of weight's first dimension, got 3"),
        (call((7,)), r"input must be \(N, C_in, L\) or \(C_in, L\), got shape \(7,\)"),
        (call(w_shape=(4, 6)), r"weight must be \(C_in, C_out/groups, K\), got shape \(4, 6\)"),
        (call(bias_shape=(5,)), r"bias must have shape \(6,\), got \(5,\)"),
        (call() | {"weight": None}, "weight must be a Tensor, not NoneType"),
        (call(output_padding=2, stride=2), "output_padding must be smaller than the larger of stride and dilation"),
        (call(padding=5), r"padding 5 leaves a negative output length \(-1\)"),
    ],
)
def test_messages(arguments, message, taken):
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        numba_tconv.conv_transpose1d(**arguments)


def test_a_tensor_on_another_device():
    for name in ("weight", "bias"):
        arguments = call(bias_shape=(6,)) | {name: torch.empty(call(bias_shape=(6,))[name].shape, device="meta")}
        with pytest.raises(RuntimeError, match=f"{name} must be on the device of input, cpu, got meta"):
            ops.check(*arguments.values(), 1, 0, 0, 1, 1)


# Arguments that torch does not have: variant and precision.


def test_unknown_variant_lists_the_rungs():
    with pytest.raises(ValueError, match=f"unknown variant 'k0': the rungs are {', '.join(RUNGS)}"):
        numba_tconv.conv_transpose1d(**call(), variant="k0")


@pytest.mark.parametrize(
    ("dtype", "precision", "known"),
    [
        (torch.float32, "fp32", "ieee, tf32, tf32x3"),
        (torch.float64, "tf32", "fp64"),
        (torch.float16, "ieee", "fp16"),
        (torch.bfloat16, "fp16", "bf16"),
        (torch.complex64, "ieee", "none to name"),
    ],
)
def test_unknown_precision_lists_those_of_the_dtype(dtype, precision, known):
    with pytest.raises(ValueError, match=f"unknown precision '{precision}': {dtype} has {known}"):
        numba_tconv.conv_transpose1d(**call(dtype=dtype), precision=precision)


@pytest.mark.parametrize("choice", [{"variant": "k1_gather"}, {"precision": "tf32"}], ids=str)
def test_cpu_tensors_cannot_have_a_choice(choice):
    with pytest.raises(NotImplementedError, match=r"needs dense CUDA tensors .* got torch.float32 on cpu"):
        numba_tconv.conv_transpose1d(**call(), **choice)


def test_the_precision_that_torch_computes_in_may_be_named_on_the_cpu():
    arguments = call()
    assert torch.equal(numba_tconv.conv_transpose1d(**arguments, precision="ieee"), TORCHS(**arguments))


PROBLEM = Problem(2, 4, 6, 3, 7)


@pytest.mark.parametrize("variant", RUNGS)
def test_a_named_variant_says_what_it_cannot_do_and_why(variant):
    with pytest.raises(NotImplementedError) as refusal:
        ops._plan(PROBLEM, torch.int64, variant, "ieee", H200)
    reason = RUNGS[variant].supports(PROBLEM, torch.int64, "ieee")
    assert str(refusal.value) == f"{variant} cannot do (2, 4->6, k3, s1, L 7): {reason}"


def test_when_no_rung_can_every_reason_is_given():
    with pytest.raises(NotImplementedError) as refusal:
        ops._plan(PROBLEM, torch.int64, "", "ieee", H200)
    for name in RUNGS:
        assert f"{name} cannot do" in str(refusal.value)


def test_an_output_past_64_bits_is_refused():
    with pytest.raises(RuntimeError, match="would have"):
        ops._plan(Problem(1, 1, 1, 2, 3, stride=2**62), torch.float32, "k1_gather", "ieee", H200)
