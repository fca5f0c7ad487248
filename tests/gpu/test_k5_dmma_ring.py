"""k5_dmma's ring on problems too small to get it.

Windows in one sample or several; fewer stages than the ring holds, or many rounds; tails of everything; rows of x in
vectors and in elements."""

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.k5_dmma.tile import MOST_STAGES, of_ring
from numba_tconv.runtime.device import current_device
from numba_tconv.selection.registry import RUNGS
from tests.parity import LAYOUTS

from .common import able, check

pytestmark = pytest.mark.gpu
K5 = RUNGS["k5_dmma"]
LENGTHS = (1, 2, 24, 126, 127, 128, 129, 130, 256, 2000)
SHAPES = {
    "stride 1": dict(channels=(16, 24), kernel_size=3, padding=1, bias=True),
    "a patch": dict(channels=(64, 32), kernel_size=2, stride=2),
    "a decoder layer": dict(channels=(40, 48), kernel_size=4, stride=2, padding=1, bias=True),
    "unequal taps": dict(channels=(24, 32), kernel_size=11, stride=5, padding=3, bias=True),
    "taps in chunks": dict(channels=(16, 64), kernel_size=40, stride=1, padding=7),
    "gaps": dict(channels=(32, 64), kernel_size=3, stride=2, dilation=2, bias=True),
    "groups, tails of channels and rows": dict(channels=(34, 38), kernel_size=3, stride=1, groups=2, bias=True),
    "many rounds of the ring": dict(channels=(328, 72), kernel_size=2, stride=2, bias=True),
    "columns beside the signal": dict(channels=(8, 64), kernel_size=3, stride=1, padding=2, dilation=5),
}


def problem_of(reason, length, batch=3):
    shape = dict(SHAPES[reason])
    (in_channels, out_channels), kernel_size = shape.pop("channels"), shape.pop("kernel_size")
    return Problem(batch, in_channels, out_channels, kernel_size, length, **shape)


def rings(problem, *x_vectors):
    able(K5, problem, torch.float64, "fp64")
    found = [of_ring(problem, x_vector, current_device()) for x_vector in x_vectors]
    if current_device().cc != (9, 0):
        pytest.skip("the ring is for compute capability 9.0")
    assert all(found)
    return found


@pytest.mark.parametrize("reason", SHAPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_ring(reason, length):
    problem = problem_of(reason, length)
    if problem.out_length < 1:
        pytest.skip("it has no output")
    x_vectors = (1, 2) if length % 2 == 0 else (1,)
    check(K5, problem, torch.float64, "fp64", configs=rings(problem, *x_vectors))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
@pytest.mark.parametrize("reason", ["a decoder layer", "unequal taps"])
def test_layouts(layout, reason):
    problem = problem_of(reason, 300)
    check(K5, problem, torch.float64, "fp64", layout, rings(problem, 1))


@pytest.mark.parametrize("reason", ["stride 1", "many rounds of the ring"])
def test_more_tiles_than_blocks_run_at_once(reason):
    problem = problem_of(reason, 20_000, batch=8)
    (ring,) = rings(problem, 2)
    assert ring.channel_chunks(problem) < 3 or ring.channel_chunks(problem) > MOST_STAGES
    check(K5, problem, torch.float64, "fp64", configs=[ring])
