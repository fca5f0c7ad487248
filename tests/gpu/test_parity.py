"""Every rung on the GPU against float64: at most twice torch's own error, in norm and in the largest element.

torch computes float32 without TF32 here (conftest.py), as "ieee" does. Outputs start as NaN.
"""

import pytest
import torch

import numba_tconv
from numba_tconv.functional import PRECISIONS
from numba_tconv.kernels import RUNGS
from numba_tconv.problem import Problem
from tests.parity import DTYPES, LAYOUTS, SMALL, far_apart, operands, parameters, poisoned, terms, verdict

pytestmark = pytest.mark.gpu
rungs = pytest.mark.parametrize("rung", RUNGS.values(), ids=RUNGS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _problem(batch, channels, kernel_size, length, **parameters):
    return Problem(batch, *channels, kernel_size, length, **parameters)


# What each row is there for, and the row: sizes that the simulator cannot walk.
LARGE = {
    "KernelBench 64's channels": _problem(2, (128, 128), 3, 2050),
    "KernelBench 74's channels and dilation": _problem(2, (32, 64), 5, 5003, dilation=3),
    "KernelBench 79's channels, stride = dilation": _problem(2, (32, 64), 3, 5003, stride=2, padding=1, dilation=2),
    "HiFi-GAN's first layer": _problem(2, (512, 256), 16, 128, stride=8, padding=4, bias=True),
    "HiFi-GAN's third layer": _problem(2, (128, 64), 4, 4099, stride=2, padding=1, bias=True),
    "patches, 1280 channels": _problem(2, (1280, 1280), 2, 300, stride=2),
    "iSTFT: K = 1024 and one output channel": _problem(2, (514, 1), 1024, 64, stride=256, padding=512),
    "WaveGlow: K = 1024, stride 256": _problem(1, (80, 80), 1024, 63, stride=256, bias=True),
    "Conv-TasNet: one output channel": _problem(2, (512, 1), 16, 1000, stride=8, padding=8),
    "PQMF: four input channels, long kernel": _problem(2, (4, 1), 64, 4000, stride=4, padding=31),
    "Demucs' last layer": _problem(2, (48, 8), 8, 5000, stride=4, bias=True),
    "depthwise, 512 groups": _problem(2, (512, 512), 4, 1001, stride=2, padding=1, groups=512),
    "depthwise, long kernel, stride 16": _problem(2, (512, 512), 32, 250, stride=16, groups=512),
    "groups of several channels": _problem(2, (96, 192), 6, 701, stride=3, padding=2, groups=12, bias=True),
    "stride 16": _problem(2, (64, 32), 32, 500, stride=16, padding=8),
    "stride 5, K = 10, output_padding": _problem(2, (64, 32), 10, 999, stride=5, padding=3, output_padding=1),
    "sizes that divide nothing": _problem(3, (37, 53), 7, 1009, stride=3, padding=2, output_padding=4, dilation=5),
    "gcd(stride, dilation) = 4": _problem(2, (24, 40), 9, 511, stride=8, dilation=12, padding=20, output_padding=11),
    "K < stride": _problem(2, (32, 16), 3, 701, stride=7, output_padding=6, bias=True),
    "dilation of many tiles": _problem(1, (16, 16), 3, 3001, dilation=1500, padding=700),
    "padding larger than the kernel": _problem(2, (16, 24), 5, 999, stride=2, padding=57, bias=True),
    "one input sample": _problem(16, (64, 64), 8, 1, stride=4, bias=True),
    "one channel, a million samples": _problem(1, (1, 1), 5, 1_000_003, stride=2, padding=2),
    "batch above 65,535, the limit of a grid's y and z": _problem(65_537, (2, 3), 3, 4, bias=True),
    "batch of 200,000": _problem(200_000, (1, 2), 4, 3, stride=2, padding=1),
}

# For what does not depend on the index formula.
FEW = ["HiFi-GAN's third layer", "sizes that divide nothing", "groups of several channels"]


def able(rung, problem, dtype):
    reason = rung.supports(problem, dtype, PRECISIONS[dtype][0])
    if reason:
        pytest.skip(f"{rung.name}: {reason}")


def in_float64(x, w, bias, problem):
    """The oracle, on the operands' device."""
    double = (None if t is None else t.double() for t in (x, w, bias))
    return torch.conv_transpose1d(*double, **parameters(problem))


def expected(x, w, bias, problem):
    """torch's own result, and the oracle."""
    return torch.conv_transpose1d(x, w, bias, **parameters(problem)), in_float64(x, w, bias, problem)


def check(rung, problem, dtype, layout="contiguous", configs=(None,)):
    able(rung, problem, dtype)
    x, w, bias = operands(problem, dtype, "cuda", layout)
    torchs, oracle = expected(x, w, bias, problem)
    for config in configs:
        y = poisoned(problem, dtype, "cuda")
        rung.run(x, w, bias, y, problem, config)
        assert verdict(y, torchs, oracle, terms(problem)) is None, config


@rungs
@dtypes
@pytest.mark.parametrize("reason", SMALL)
def test_small_problems(rung, dtype, reason):
    check(rung, SMALL[reason], dtype)


@rungs
@pytest.mark.parametrize("reason", ["positions past one tile, strided", "groups, unequal channels"])
@dtypes
def test_tiny_tiles(rung, dtype, reason):
    check(rung, SMALL[reason], dtype, configs=rung.tiny_configs(SMALL[reason], dtype))


@rungs
@dtypes
@pytest.mark.parametrize("reason", LARGE)
def test_large_problems(rung, dtype, reason):
    check(rung, LARGE[reason], dtype)


@rungs
@dtypes
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
@pytest.mark.parametrize("reason", FEW)
def test_layouts(rung, dtype, layout, reason):
    check(rung, LARGE[reason], dtype, layout)


@dtypes
@pytest.mark.parametrize("variant", [None, *RUNGS])
@pytest.mark.parametrize("reason", FEW)
def test_public_function(variant, dtype, reason):
    problem = LARGE[reason]
    if variant:
        able(RUNGS[variant], problem, dtype)
    x, w, bias = operands(problem, dtype, "cuda")
    torchs, oracle = expected(x, w, bias, problem)
    # The allocator hands memory out again, so the output most likely starts as NaN.
    poisoned(problem, dtype, "cuda")
    y = numba_tconv.conv_transpose1d(x, w, bias, **parameters(problem), variant=variant)
    assert verdict(y, torchs, oracle, terms(problem)) is None
    unbatched = numba_tconv.conv_transpose1d(x[0], w, bias, **parameters(problem), variant=variant)
    assert verdict(unbatched, torchs[0], oracle[0], terms(problem)) is None


@rungs
@dtypes
@pytest.mark.parametrize("reason", FEW)
def test_bitwise_reproducible(rung, dtype, reason):
    problem = LARGE[reason]
    able(rung, problem, dtype)
    x, w, bias = operands(problem, dtype, "cuda")
    first, second = (poisoned(problem, dtype, "cuda") for _ in range(2))
    rung.run(x, w, bias, first, problem)
    rung.run(x, w, bias, second, problem)
    assert torch.equal(first, second)


@rungs
@dtypes
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("reason", FEW)
def test_nan_and_infinity_go_where_the_definition_sends_them(rung, dtype, value, reason):
    problem = LARGE[reason]
    able(rung, problem, dtype)
    x, w, bias = operands(problem, dtype, "cuda")
    x[0, 0, 0] = x[-1, -1, problem.length // 2] = x[0, 1, -1] = value
    # On the CPU, where torch scatters and invents no products with zero.
    oracle = in_float64(*(None if t is None else t.cpu() for t in (x, w, bias)), problem)
    y = poisoned(problem, dtype, "cuda")
    rung.run(x, w, bias, y, problem)
    y = y.cpu()
    for which in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(which(y), which(oracle))


@rungs
@dtypes
@pytest.mark.parametrize("reason", FEW)
def test_a_weight_that_is_not_finite_reaches_every_output_it_has(rung, dtype, reason):
    # And perhaps a few at the edges: a kernel that reads zeros past the ends of the signal multiplies them too.
    problem = LARGE[reason]
    able(rung, problem, dtype)
    x, w, bias = operands(problem, dtype, "cuda")
    w[0, 0, 0] = w[-1, -1, -1] = float("nan")
    oracle = in_float64(*(None if t is None else t.cpu() for t in (x, w, bias)), problem)
    y = poisoned(problem, dtype, "cuda")
    rung.run(x, w, bias, y, problem)
    reached, nan = oracle.isnan(), y.cpu().isnan()
    assert nan[reached].all()
    edge = problem.dilation * (problem.kernel_size - 1) + problem.stride + problem.output_padding
    assert torch.equal(nan[..., edge:-edge], reached[..., edge:-edge])


# 64-bit addresses


@rungs
def test_samples_far_apart(rung):
    problem = LARGE["HiFi-GAN's third layer"]
    x, w, bias = operands(problem, torch.float32, "cuda")
    torchs, oracle = expected(x, w, bias, problem)
    y = poisoned(problem, torch.float32, "cuda")
    rung.run(far_apart(x), w, bias, y, problem)
    assert verdict(y, torchs, oracle, terms(problem)) is None


@rungs
def test_more_than_2_to_the_31_outputs(rung):
    problem = _problem(2, (1, 2), 2, 2**28 + 3, stride=2)
    x, w, bias = operands(problem, torch.float32, "cuda")
    y = poisoned(problem, torch.float32, "cuda")
    rung.run(x, w, bias, y, problem)
    assert y.numel() > 2**31
    # K = stride and no padding: an output depends on one input, so each end is the result of its own end.
    for ours, end in ((y[..., :2000], x[..., :1000]), (y[..., -2000:], x[..., -1000:])):
        piece = _problem(2, (1, 2), 2, 1000, stride=2)
        assert verdict(ours, *expected(end, w, bias, piece)) is None
    assert not y.isnan().any()
