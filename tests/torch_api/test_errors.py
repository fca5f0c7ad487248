"""Refusals: by sizes together, of calls beside the signature, their messages, and arguments that torch does not have.

test_bad_calls.py replaces arguments one by one and in pairs. The CUDA path's checks read shapes, dtypes and values
only, so CPU tensors serve: `_ours`, which decides who computes, accepts them. torch's own function is watched.
"""

import itertools

import pytest
import torch

import numba_tconv
from numba_tconv.formula.problem import Problem
from numba_tconv.runtime.device import H200
from numba_tconv.selection.registry import RUNGS
from numba_tconv.torch_api import functional
from numba_tconv.torch_api import operators as ops
from tests.bad_calls import outcome
from tests.thorough import thorough

TORCHS = torch.conv_transpose1d


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


def agree(arguments, watched, named):
    """Check that our outcome is torch's; a refusal is ours, and mentions one of ``named``."""
    theirs, ours = outcome(TORCHS, arguments), outcome(numba_tconv.conv_transpose1d, arguments)
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs)
        return
    assert type(ours) is type(theirs), f"torch raises {theirs!r}, ours is {ours!r}"
    # torch's backends differ on outputs without samples, so torch decides.
    if "Output size is too small" not in str(theirs):
        assert not watched.reached, f"only torch refused it: {theirs}"
        assert any(name in str(ours) for name in named), f"{ours} names none of {named}"


def call(x_shape=(2, 4, 7), w_shape=(4, 6, 3), bias_shape=None, dtype=torch.float32, **arguments):
    tensors = {"input": torch.randn(x_shape).to(dtype), "weight": torch.randn(w_shape).to(dtype)}
    if bias_shape is not None:
        tensors["bias"] = torch.randn(bias_shape).to(dtype)
    return tensors | arguments


GEOMETRIES = list(itertools.product((1, 2, 3), (0, 1, 4, 9), (0, 1, 2, 4), (1, 2, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("stride", "padding", "output_padding", "dilation"), thorough(GEOMETRIES, always=GEOMETRIES[::5])
)
def test_geometry(stride, padding, output_padding, dilation, dtype, taken, watched):
    arguments = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
    agree(call(**arguments, dtype=dtype), watched, named=["output_padding must be smaller", "negative output length"])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"input": torch.ones(1, 1, 1)},
        {"weight": torch.ones(1, 1, 1)},
        call() | {"strides": 2},
    ],
    ids=["nothing", "no weight", "no input", "unknown keyword"],
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
        ops._plan(Problem(1, 1, 1, 2, 3, stride=2**62, padding=1), torch.float32, "k1_gather", "ieee", H200)
