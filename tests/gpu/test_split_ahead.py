"""tf32x3 by k6 where producer warps split x: they must read x alone, whatever else a stage holds."""

import math

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.k6_wgmma.choose import choose
from numba_tconv.selection.registry import RUNGS
from tests.parity import computed, operands, terms, verdict

from .common import able, check_beside_loud, expected

pytestmark = pytest.mark.gpu

K6, DTYPE, PRECISION = RUNGS["k6_wgmma"], torch.float32, "tf32x3"
PROBLEMS = {
    "five taps, three apart": Problem(2, 32, 64, 5, 517, dilation=3),
    "three taps, six apart": Problem(2, 32, 64, 3, 700, dilation=6),
    "two chunks of taps": Problem(2, 40, 64, 7, 301),
    "a stride": Problem(2, 64, 32, 16, 1030, stride=4, padding=6),
    "weights that do not fit": Problem(2, 512, 256, 32, 300, stride=8),
    "groups": Problem(2, 64, 128, 5, 389, groups=2),
    "groups of channels that are no stage": Problem(2, 48, 128, 5, 389, groups=2),
    "samples that share windows": Problem(20, 32, 64, 5, 20, dilation=2),
    "samples that share windows, by elements": Problem(9, 64, 64, 5, 9, dilation=3),
}
reasons = pytest.mark.parametrize("reason", PROBLEMS)


def problem_of(reason):
    problem = PROBLEMS[reason]
    able(K6, problem, DTYPE, PRECISION)
    assert choose(problem, PRECISION).split_ahead
    return problem


def output(x, w, problem):
    return computed(K6, x, w, None, problem, precision=PRECISION)


@reasons
@pytest.mark.parametrize("beside", [1e30, math.inf, math.nan])
@pytest.mark.parametrize(("before", "behind"), [(0, 0), (0, 1), (1, 2), (2, 3), (3, 5), (4, 4)])
def test_what_is_beside_a_row_counts_for_nothing(reason, beside, before, behind):
    """Rows of a larger tensor, which begin anywhere."""
    problem = problem_of(reason)
    x, w, _ = operands(problem, DTYPE, "cuda")
    wider = x.new_full((*x.shape[:2], before + problem.length + behind), beside)
    view = wider[..., before : before + problem.length]
    view.copy_(x)
    y = output(view, w, problem)
    assert verdict(y, *expected(x, w, None, problem), terms(problem), PRECISION) is None


@reasons
@pytest.mark.parametrize("smaller", [2.0**-10, 2.0**-30])
def test_samples_of_other_sizes(reason, smaller):
    """Every second sample is much smaller, and loses no more than it may beside a large one."""
    problem = problem_of(reason)
    x, w, _ = operands(problem, DTYPE, "cuda")
    x[1::2] *= smaller
    check_beside_loud(output(x, w, problem), x, w, problem)


@reasons
def test_stages_of_other_sizes(reason):
    """Each stage has its own scale: half of the channels are larger, and the weights make up for it."""
    problem = problem_of(reason)
    x, w, _ = operands(problem, DTYPE, "cuda")
    half = problem.in_channels // 2
    x[:, :half] *= 2.0**16
    w[:half] *= 2.0**-16
    assert verdict(output(x, w, problem), *expected(x, w, None, problem), terms(problem), PRECISION) is None
