"""Helpers of the GPU tests: full-size problems, pairs of dtype and precision, and the check of a rung."""

import functools

import pytest
import torch

from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import accuracy, fuzz
from numba_tconv.lab.measure.directions import Operands
from numba_tconv.runtime.device import current_device
from numba_tconv.selection.registry import RUNGS
from numba_tconv.torch_api import torchs
from tests.fences import Fenced
from tests.gradient_parity import computed_gradient, gradient_operands, gradient_terms, torchs_gradient
from tests.parity import computed, operands, parameters, poisoned, terms, verdict


def _problem(batch, channels, kernel_size, length, **parameters):
    return Problem(batch, *channels, kernel_size, length, **parameters)


# Reason and problem: sizes too large for the simulator.
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

# Independent of the index formula.
FEW = ["HiFi-GAN's third layer", "sizes that divide nothing", "groups of several channels"]

ARITHMETIC = [(dtype, precision) for dtype, known in PRECISIONS.items() for precision in known]
rungs = pytest.mark.parametrize("rung", RUNGS.values(), ids=RUNGS)
arithmetic = pytest.mark.parametrize(("dtype", "precision"), ARITHMETIC, ids=[precision for _, precision in ARITHMETIC])

# Only tensor-core rungs multiply padding zeros, in rows' last chunks and around the signal, and split or round
# operands.
TENSOR_CORES = [
    rung for rung in RUNGS.values() if rung.supports(_problem(1, (16, 16), 3, 8), torch.float32, "tf32") is None
]
TENSOR_ARITHMETIC = [pair for pair in ARITHMETIC if pair[1] in ("tf32", "tf32x3", "fp16", "bf16")]
tensor_cores = pytest.mark.parametrize("rung", TENSOR_CORES, ids=lambda rung: rung.name)
tensor_arithmetic = pytest.mark.parametrize(
    ("dtype", "precision"), TENSOR_ARITHMETIC, ids=[precision for _, precision in TENSOR_ARITHMETIC]
)


def able(rung, problem, dtype, precision):
    if reason := rung.refusal(problem, dtype, precision, current_device()):
        pytest.skip(f"{rung.name}: {reason}")


def in_float64(x, w, bias, problem):
    return fuzz.in_float64("forward", (x, w, bias), problem)


def expected(x, w, bias, problem, precision="ieee"):
    """torch's result, with TF32 allowed if ``precision`` is "tf32", and the oracle."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=precision == "tf32"):
        theirs = torchs.forward(x, w, bias, **parameters(problem))
    return theirs, in_float64(x, w, bias, problem)


def rounding_of(result, operands, problem, precision):
    """For ``verdict``: the error that a precision may cost where torch computes in another."""
    if precision not in accuracy.OPERANDS_SPREAD:
        return None
    return functools.partial(accuracy.rounding, result, operands, problem, precision)


def check(rung, problem, dtype, precision, layout="contiguous", configs=(None,), place=lambda x: x):
    """Skip what the rung cannot do; else compare it with torch, on an output full of NaN. ``place`` moves the input."""
    able(rung, problem, dtype, precision)
    x, w, bias = operands(problem, dtype, "cuda", layout)
    torchs, oracle = expected(x, w, bias, problem, precision)
    for config in configs:
        y = computed(rung, place(x), w, bias, problem, config, precision)
        rounding = rounding_of("forward", Operands(x, w, bias), problem, precision)
        if wrong := verdict(y, torchs, oracle, terms(problem), precision, rounding):
            pytest.fail(f"{rung.name}, {precision}, {layout}, {problem}, {config}: {wrong}")


def check_beside_loud(y, x, w, problem):
    """tf32x3 loses at most 2^-38 of the loudest signal; return the errors, and the sums of products' magnitudes."""
    magnitudes, loudest = (
        torch.conv_transpose1d(signal.double(), w.double().abs(), **parameters(problem))
        for signal in (x.abs(), torch.full_like(x, x.abs().max()))
    )
    errors = (y.double() - in_float64(x, w, None, problem)).abs()
    assert (errors <= 2.0**-19 * magnitudes + 2.0**-38 * loudest).all()
    return errors, magnitudes


def check_places(rung, problem, dtype, precision, offsets, config=None):
    """Outputs that begin so many elements after a multiple of 512 bytes; the memory around them stays as it was."""
    able(rung, problem, dtype, precision)
    x, w, bias = operands(problem, dtype, "cuda")
    torchs, oracle = expected(x, w, bias, problem, precision)
    for offset in offsets:
        y = Fenced(poisoned(problem, dtype, "cuda"), offset)
        rung.run(x, w, bias, y.tensor, problem, config, precision)
        assert verdict(y.tensor, torchs, oracle, terms(problem), precision) is None, offset
        assert y.is_fence_whole(), offset


def expected_gradient(of, g, x, w, problem, precision="ieee"):
    """torch's gradient, with TF32 allowed if ``precision`` is "tf32", and the oracle, on the operands' device."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=precision == "tf32"):
        torchs = torchs_gradient(of, g, x, w, problem)
    return torchs, torchs_gradient(of, g.double(), x.double(), w.double(), problem)


def check_gradient(rung, problem, dtype, precision, layout="contiguous", configs=(None,), place=lambda tensor: tensor):
    """As ``check``; ``place`` moves the operands with samples."""
    able(rung, problem, dtype, precision)
    g, x, w = gradient_operands(problem, dtype, "cuda", layout)
    torchs, oracle = expected_gradient(rung.of, g, x, w, problem, precision)
    for config in configs:
        result = computed_gradient(rung, place(g), place(x), w, problem, config, precision)
        rounding = rounding_of(rung.of, Operands(x, w, None, g), problem, precision)
        wrong = verdict(result, torchs, oracle, gradient_terms(rung.of, problem), precision, rounding)
        assert wrong is None, (problem, config, wrong)
