"""Every rung on the GPU against float64: at most twice torch's own error, in norm and in the largest element.

torch computes in the same precision, for tf32x3 in float32 without TF32. Outputs start as NaN.
"""

from dataclasses import replace

import pytest
import torch

import numba_tconv
from numba_tconv.formula.problem import Problem
from numba_tconv.runtime.device import current_device
from numba_tconv.selection.registry import RUNGS
from tests.parity import LAYOUTS, SMALL, computed, far_apart, operands, parameters, poisoned, terms, verdict

from .common import FEW, LARGE, TENSOR_CORES, able, arithmetic, check, expected, in_float64, rungs

pytestmark = pytest.mark.gpu
float32 = pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])


@rungs
@arithmetic
@pytest.mark.parametrize("reason", SMALL)
def test_small_problems(rung, dtype, precision, reason):
    check(rung, SMALL[reason], dtype, precision)


@pytest.mark.parametrize(
    "rung", [rung for rung in RUNGS.values() if rung not in TENSOR_CORES], ids=lambda rung: rung.name
)
@pytest.mark.parametrize("reason", ["positions past one tile, strided", "groups, unequal channels"])
@arithmetic
def test_tiny_tiles(rung, dtype, precision, reason):
    check(rung, SMALL[reason], dtype, precision, configs=rung.tiny_configs(SMALL[reason], dtype))


@rungs
@arithmetic
@pytest.mark.parametrize("reason", LARGE)
def test_large_problems(rung, dtype, precision, reason):
    check(rung, LARGE[reason], dtype, precision)


@rungs
@arithmetic
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
@pytest.mark.parametrize("reason", FEW)
def test_layouts(rung, dtype, precision, layout, reason):
    check(rung, LARGE[reason], dtype, precision, layout)


@arithmetic
@pytest.mark.parametrize("variant", [None, *RUNGS])
@pytest.mark.parametrize("reason", FEW)
def test_public_function(variant, dtype, precision, reason):
    problem = LARGE[reason]
    if variant:
        able(RUNGS[variant], problem, dtype, precision)
    x, w, bias = operands(problem, dtype, "cuda")
    torchs, oracle = expected(x, w, bias, problem, precision)
    choice = parameters(problem) | {"variant": variant, "precision": precision}
    # The allocator reuses memory, so the output most likely starts as NaN.
    poisoned(problem, dtype, "cuda")
    y = numba_tconv.conv_transpose1d(x, w, bias, **choice)
    assert verdict(y, torchs, oracle, terms(problem), precision) is None
    unbatched = numba_tconv.conv_transpose1d(x[0], w, bias, **choice)
    assert verdict(unbatched, torchs[0], oracle[0], terms(problem), precision) is None


@rungs
@arithmetic
@pytest.mark.parametrize("reason", FEW)
def test_bitwise_reproducible(rung, dtype, precision, reason):
    problem = LARGE[reason]
    able(rung, problem, dtype, precision)
    x, w, bias = operands(problem, dtype, "cuda")
    first, second = (computed(rung, x, w, bias, problem, precision=precision) for _ in range(2))
    assert torch.equal(first, second)


@rungs
@arithmetic
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("reason", FEW)
def test_nan_and_infinity_go_where_the_definition_sends_them(rung, dtype, precision, value, reason):
    """On tensor cores perhaps further, by padding taps, but to no other sample. tf32x3 may turn infinity into NaN."""
    problem = replace(LARGE[reason], batch=3)
    able(rung, problem, dtype, precision)
    x, w, bias = operands(problem, dtype, "cuda")
    x[1, 0, 0] = x[1, -1, problem.length // 2] = x[1, 1, -1] = value
    # On the CPU torch scatters and multiplies no zeros.
    oracle = in_float64(*(None if t is None else t.cpu() for t in (x, w, bias)), problem)
    y = computed(rung, x, w, bias, problem, precision=precision).cpu()
    if rung in TENSOR_CORES:
        assert not y[~oracle.isfinite()].isfinite().any()
        assert y[0].isfinite().all()
        assert y[2].isfinite().all()
        return
    for which in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(which(y), which(oracle))


@rungs
@arithmetic
@pytest.mark.parametrize("reason", FEW)
def test_a_weight_that_is_not_finite_reaches_every_output_it_has(rung, dtype, precision, reason):
    # Zeros read beyond the signal are multiplied too, so a few edges may follow.
    problem = LARGE[reason]
    able(rung, problem, dtype, precision)
    x, w, bias = operands(problem, dtype, "cuda")
    w[0, 0, 0] = w[-1, -1, -1] = float("nan")
    oracle = in_float64(*(None if t is None else t.cpu() for t in (x, w, bias)), problem)
    reached, nan = oracle.isnan(), computed(rung, x, w, bias, problem, precision=precision).cpu().isnan()
    assert nan[reached].all()
    if rung.name in ("k1_gather", "k2_polyphase"):  # they read nothing beyond the ends
        assert torch.equal(nan, reached)
    edge = problem.dilation * (problem.kernel_size - 1) + problem.stride + problem.output_padding
    assert torch.equal(nan[..., edge:-edge], reached[..., edge:-edge])


# 64-bit addresses


@rungs
@float32
@pytest.mark.parametrize("reason", ["HiFi-GAN's third layer", "depthwise, 512 groups"])
def test_samples_far_apart(rung, precision, reason):
    check(rung, LARGE[reason], torch.float32, precision, place=far_apart)


@pytest.mark.parametrize("rung", [RUNGS["k4_register_tile"], RUNGS["k5_dmma"]], ids=lambda rung: rung.name)
def test_samples_far_apart_in_float64(rung):
    check(rung, LARGE["HiFi-GAN's third layer"], torch.float64, "fp64", place=far_apart)


@rungs
@float32
def test_more_than_2_to_the_31_outputs(rung, precision, much_memory):
    problem = Problem(2, 1, 2, 2, 2**28 + 3, stride=2)
    able(rung, problem, torch.float32, precision)
    x, w, bias = operands(problem, torch.float32, "cuda")
    y = computed(rung, x, w, bias, problem, precision=precision)
    assert y.numel() > 2**31
    # K = stride and no padding: an output depends on one input, and each end on its own.
    for ours, end in ((y[..., :2000], x[..., :1000]), (y[..., -2000:], x[..., -1000:])):
        piece = replace(problem, length=1000)
        assert verdict(ours, *expected(end, w, bias, piece, precision), precision=precision) is None
    assert not y.isnan().any()


# Precisions that are not named, and their substitutes


@pytest.mark.parametrize("reason", [*FEW, "depthwise, 512 groups"])
def test_torchs_switch_decides_the_precision_that_is_not_named(reason):
    """Where TF32 is allowed, a rung uses it if it can; else nothing changes."""
    problem = LARGE[reason]
    x, w, bias = operands(problem, torch.float32, "cuda")

    def ours(**choice):
        return numba_tconv.conv_transpose1d(x, w, bias, **parameters(problem), **choice)

    assert torch.equal(ours(), ours(precision="ieee"))  # conftest.py forbids TF32
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        allowed = ours()
        assert torch.equal(ours(variant="k2_polyphase"), ours(variant="k2_polyphase", precision="ieee"))
    if all(rung.refusal(problem, torch.float32, "tf32", current_device()) for rung in RUNGS.values()):
        assert torch.equal(allowed, ours(precision="ieee"))
        with pytest.raises(NotImplementedError, match="tf32"):
            ours(precision="tf32")
    else:
        assert torch.equal(allowed, ours(precision="tf32"))


@pytest.mark.parametrize(
    "reason", ["depthwise, 512 groups", "one channel, a million samples", "PQMF: four input channels, long kernel"]
)
def test_tf32x3_is_ieee_where_no_rung_takes_it(reason):
    problem = LARGE[reason]
    x, w, bias = operands(problem, torch.float32, "cuda")

    def ours(**choice):
        return numba_tconv.conv_transpose1d(x, w, bias, **parameters(problem), **choice)

    assert torch.equal(ours(precision="tf32x3"), ours(precision="ieee"))
    for rung in RUNGS:
        with pytest.raises(NotImplementedError, match=f"{rung} cannot do"):
            ours(precision="tf32x3", variant=rung)
