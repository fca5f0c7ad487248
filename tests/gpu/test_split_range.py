"""tf32x3 for numbers of very different sizes: operands are scaled to fp16's exponents. torch computes in float32."""

from dataclasses import replace

import pytest
import torch

from tests.parity import computed, operands, terms, verdict

from .common import LARGE, able, check_beside_loud, expected, in_float64, tensor_cores

pytestmark = pytest.mark.gpu

DTYPE, PRECISION = torch.float32, "tf32x3"
NEAR = 512  # positions; no tile's window has more
reasons = pytest.mark.parametrize("reason", ["HiFi-GAN's third layer", "KernelBench 74's channels and dilation"])


def made(rung, problem):
    able(rung, problem, DTYPE, PRECISION)
    x, w, _ = operands(problem, DTYPE, "cuda")
    return x, w


def output(rung, x, w, problem):
    return computed(rung, x, w, None, problem, precision=PRECISION)


def without_bias(reason):
    return replace(LARGE[reason], bias=False)


@tensor_cores
@reasons
@pytest.mark.parametrize(
    ("of_x", "of_weights"),
    [
        *[(1e-30, 1e15), (1e-9, 1e-9), (1e-9, 1), (1e-9, 1e15), (1, 1e-9), (1, 1), (1, 1e15)],
        *[(1e15, 1e-30), (1e15, 1e-9), (1e15, 1), (1e15, 1e15), (1e30, 1e-30), (1e30, 1e-9), (1e30, 1)],
    ],
)
def test_however_large_and_small(rung, reason, of_x, of_weights):
    problem = without_bias(reason)
    x, w = made(rung, problem)
    x, w = x * of_x, w * of_weights
    exact = in_float64(x, w, None, problem)
    torchs, _ = expected(x, w, None, problem)
    assert verdict(output(rung, x, w, problem), torchs, exact, terms(problem), PRECISION) is None


@tensor_cores
@reasons
@pytest.mark.parametrize("apart", [2**8, 2**12, 2**16])
def test_channels_of_other_sizes_that_the_weights_make_up_for(rung, reason, apart):
    """Every second channel is that much smaller, its weights as much larger: all count alike."""
    problem = without_bias(reason)
    x, w = made(rung, problem)
    x[:, ::2] /= apart
    w[::2] *= apart
    torchs, exact = expected(x, w, None, problem)
    assert verdict(output(rung, x, w, problem), torchs, exact, terms(problem), PRECISION) is None


@tensor_cores
@reasons
@pytest.mark.parametrize("quiet", [2.0**-10, 2.0**-20, 2.0**-50])
def test_beside_a_loud_signal_a_quiet_one_stays(rung, reason, quiet):
    """In a tile with both, the quiet signal loses at most 2^-39 of the loud one; elsewhere nothing."""
    problem = without_bias(reason)
    x, w = made(rung, problem)
    half = problem.length // 2
    x[..., :half] *= quiet
    errors, magnitudes = check_beside_loud(output(rung, x, w, problem), x, w, problem)
    far = slice(NEAR * problem.stride, (half - NEAR) * problem.stride)
    assert half > 3 * NEAR
    assert (errors <= 2.0**-19 * magnitudes)[..., far].all()


@tensor_cores
@reasons
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_no_number_costs_its_neighbours_nothing(rung, reason, value):
    problem = without_bias(reason)
    x, w = made(rung, problem)
    torchs, exact = expected(x, w, None, problem)
    x[0, 1, problem.length // 2] = value
    y = output(rung, x, w, problem)
    reached, lost = ~in_float64(x, w, None, problem).isfinite(), ~y.isfinite()
    assert reached.any()
    assert lost[reached].all()
    assert lost.sum() <= 3 * problem.out_channels * problem.kernel_size, "a tap that pads a chunk may meet it, too"
    kept = [t.masked_fill(lost, 0) for t in (y, torchs, exact)]
    assert verdict(*kept, terms(problem), PRECISION) is None


@tensor_cores
@reasons
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_weight_that_is_no_number_costs_the_others_nothing(rung, reason, value):
    problem = without_bias(reason)
    x, w = made(rung, problem)
    torchs, exact = expected(x, w, None, problem)
    w[1, 3, 2] = value
    y = output(rung, x, w, problem)
    others = torch.arange(problem.out_channels, device="cuda") != 3
    assert not y[:, 3].isfinite().all()
    kept = [t[:, others] for t in (y, torchs, exact)]
    assert verdict(*kept, terms(problem), PRECISION) is None


@tensor_cores
@reasons
def test_zeros(rung, reason):
    problem = without_bias(reason)
    x, w = made(rung, problem)
    assert not output(rung, torch.zeros_like(x), w, problem).any()
    assert not output(rung, x, torch.zeros_like(w), problem).any()
