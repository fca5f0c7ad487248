"""The depthwise rung's form for long filters on the GPU, in each tile, for rows that begin anywhere in memory."""

import math

import pytest
import torch

from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.depthwise import long_tile as depthwise_long_config
from numba_tconv.runtime.device import current_device
from numba_tconv.selection.registry import RUNGS
from tests.parity import DTYPES, LAYOUTS, computed, operands

from .common import check, check_places, expected

pytestmark = pytest.mark.gpu

# Reason and problem.
PROBLEMS = {
    "PQMF, rows at 16 bytes": Problem(3, 4, 1, 64, 20_000, 4, padding=31),
    "PQMF, rows anywhere": Problem(3, 4, 1, 64, 19_997, 4, padding=31, bias=True),
    "stride 1, chunks of taps": Problem(2, 24, 24, 101, 9001, padding=50, groups=24, bias=True),
    "stride 1, one long filter, sums in parts": Problem(2, 24, 24, 301, 9001, padding=150, groups=24),
    "unequal taps, two outputs": Problem(2, 15, 6, 37, 7003, 3, padding=7, output_padding=2, groups=3, bias=True),
    "eight channels, dilation": Problem(2, 8, 4, 33, 6001, 2, dilation=3, padding=20),
    "phases without taps": Problem(2, 4, 2, 66, 5003, 4, dilation=2, bias=True),
    "eight phases, sums in parts": Problem(2, 8, 1, 264, 3001, 8, padding=130, bias=True),
    "sixteen phases": Problem(2, 2, 1, 200, 3001, 16, padding=90),
    "a row shorter than a block": Problem(300, 4, 1, 64, 9, 4, padding=31, bias=True),
}
problems = pytest.mark.parametrize("reason", PROBLEMS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def asynchronous_copies():
    if current_device().cc < depthwise_long_config.MINIMUM_CC:
        pytest.skip("this GPU has no asynchronous copies")


def configs(problem, dtype):
    """For each number of columns the largest and the smallest block, and tiny ones."""
    found = depthwise_long_config.tiles(problem, dtype)
    assert found
    ends = {config.columns: config for config in found} | {-config.columns: config for config in found[::-1]}
    return [*dict.fromkeys(ends.values()), *depthwise_long_config.tiny(problem, dtype)]


@problems
@dtypes
def test_every_tile(reason, dtype):
    problem = PROBLEMS[reason]
    check(RUNGS["depthwise"], problem, dtype, PRECISIONS[dtype][0], configs=configs(problem, dtype))


@dtypes
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
@pytest.mark.parametrize("reason", ["PQMF, rows anywhere", "unequal taps, two outputs"])
def test_layouts(reason, layout, dtype):
    problem = PROBLEMS[reason]
    tiles = depthwise_long_config.tiles(problem, dtype)
    check(RUNGS["depthwise"], problem, dtype, PRECISIONS[dtype][0], layout, [tiles[0], tiles[-1]])


@dtypes
def test_an_output_that_begins_anywhere(dtype):
    problem = PROBLEMS["PQMF, rows anywhere"]
    config = depthwise_long_config.tiles(problem, dtype)[0]
    check_places(RUNGS["depthwise"], problem, dtype, PRECISIONS[dtype][0], range(9), config)


@dtypes
def test_nan_goes_where_the_definition_sends_it(dtype):
    problem = PROBLEMS["phases without taps"]
    x, w, bias = operands(problem, dtype, "cpu")
    x[0, 0, 0] = x[1, 1, 2500] = x[1, -1, -1] = math.nan
    _, oracle = expected(x, w, bias, problem)
    config = depthwise_long_config.tiles(problem, dtype)[0]
    y = computed(RUNGS["depthwise"], x.cuda(), w.cuda(), bias.cuda(), problem, config)
    assert torch.equal(y.cpu().isnan(), oracle.isnan())
