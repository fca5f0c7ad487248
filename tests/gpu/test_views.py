"""Every rung and gradient on views of any strides, between fences; values at the ends of a dtype's range."""

import itertools

import pytest
import torch

import numba_tconv
from numba_tconv.lab.measure import fuzz
from numba_tconv.selection.gradient import EXACT, GRADIENTS
from numba_tconv.selection.registry import RUNGS
from tests.exact import RANGES, exact_operands
from tests.fences import VIEWS, fenced
from tests.gradient_parity import gradient_operands, inputs_of, poisoned_gradient
from tests.parity import SMALL, computed, operands, parameters, poisoned

from .common import FEW, LARGE, TENSOR_CORES, able, arithmetic, in_float64, rungs

pytestmark = pytest.mark.gpu
views = pytest.mark.parametrize("view", VIEWS)
shifts = pytest.mark.parametrize("shift", [0, 1])


@rungs
@arithmetic
@views
@shifts
def test_rungs(rung, dtype, precision, view, shift):
    for reason in FEW:
        problem = LARGE[reason]
        able(rung, problem, dtype, precision)
        x, w, bias = operands(problem, dtype, "cuda")
        x, w = VIEWS[view](x), VIEWS[view](w)
        y = fenced(
            lambda *tensors, problem=problem: rung.run(*tensors, problem, precision=precision),
            *((x, w, bias), poisoned(problem, dtype, "cuda"), shift),
        )
        # A repeated number is rounded the same way everywhere, so errors do not average out as torch's do.
        far = (y.double() - in_float64(x, w, bias, problem)).abs()
        assert (far <= fuzz.bound("forward", (x, w, bias), problem, dtype, precision)).all(), reason


@pytest.mark.parametrize("rung", GRADIENTS.values(), ids=GRADIENTS)
@arithmetic
@views
@shifts
def test_gradients(rung, dtype, precision, view, shift):
    for reason in FEW:
        problem = LARGE[reason]
        able(rung, problem, dtype, precision)
        operands = inputs_of(rung.of, *(VIEWS[view](tensor) for tensor in gradient_operands(problem, dtype, "cuda")))
        result = fenced(
            lambda *tensors, problem=problem: rung.run(*tensors, problem, precision=precision),
            *(operands, poisoned_gradient(rung.of, problem, dtype, "cuda"), shift),
        )
        far = (result.double() - fuzz.in_float64(rung.of, operands, problem)).abs()
        assert (far <= fuzz.bound(rung.of, operands, problem, dtype, precision)).all(), reason


@rungs
@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("reason", ["groups, unequal channels", "K = 2s, the usual decoder layer", "stride 1"])
def test_the_ends_of_a_range(rung, name, reason):
    """On tensor cores for float16 alone: they treat small float32 and bfloat16 numbers in their own way."""
    problem, dtype = SMALL[reason], RANGES[name][0]
    precision = EXACT[dtype]
    able(rung, problem, dtype, precision)
    if rung in TENSOR_CORES and dtype != torch.float16:
        pytest.skip(f"{rung.name} multiplies on tensor cores")
    x, w, bias, exact = exact_operands(problem, name)
    there = (None if t is None else t.cuda() for t in (x, w, bias))
    assert torch.equal(computed(rung, *there, problem, precision=precision).cpu(), exact)


@pytest.mark.parametrize("variant", [None, *RUNGS])
def test_outputs_have_memory_of_their_own(variant):
    """Even where the output could be the input, has its size, or has one sample without its dimension."""
    dtype = torch.float64 if variant == "k5_dmma" else torch.float32
    x, w = torch.randn(2, 16, 300, device="cuda", dtype=dtype), torch.eye(16, device="cuda", dtype=dtype)[:, :, None]
    choice = {"variant": variant, "precision": EXACT[dtype]}
    if variant == "depthwise":
        w, choice["groups"] = torch.ones(16, 1, 1, device="cuda"), 16
    if variant is not None and RUNGS[variant] in TENSOR_CORES:
        choice["precision"] = "tf32"
        able(RUNGS[variant], LARGE["HiFi-GAN's third layer"], torch.float32, "tf32")
    results = [x, w, *(numba_tconv.conv_transpose1d(one, w, **choice) for one in (x, x, x[0], x[:1]))]
    for one, other in itertools.combinations(results, 2):
        assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def test_gradients_have_memory_of_their_own():
    problem = LARGE["HiFi-GAN's third layer"]
    x, w, bias = (t.requires_grad_() for t in operands(problem, torch.float32, "cuda"))
    y = numba_tconv.conv_transpose1d(x, w, bias, **parameters(problem))
    g = torch.randn_like(y)
    results = [x, w, bias, y, g, *torch.autograd.grad(y, (x, w, bias), g)]
    for one, other in itertools.combinations(results, 2):
        assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
