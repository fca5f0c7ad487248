"""Tensor-core rungs at the edges of their tiles: rows, columns and channels one less, as many, one more.

Tiles are 128 rows of 128 columns, of which a strided tile owns 120 or fewer, and take 8 or 16 channels at a time.
"""

from dataclasses import replace

import pytest

from numba_tconv.formula.problem import Problem
from tests.parity import LAYOUTS

from .common import check, check_places, tensor_arithmetic, tensor_cores

pytestmark = pytest.mark.gpu

# Stride, kernel size, dilation: one row of taps a channel; four rows; three, whose last tap lacks two.
SHAPES = {"stride 1": (1, 3, 1), "stride 4": (4, 8, 1), "stride 3, dilation 2": (3, 7, 2)}
IN_CHANNELS = (7, 8, 9, 15, 16, 17)
LENGTHS = (1, 2, 3, 119, 120, 121, 127, 128, 129, 239, 240, 241, 255, 256, 257)
shapes = pytest.mark.parametrize("shape", SHAPES)


def problem_of(shape, in_channels, out_channels, length, batch=2):
    stride, kernel_size, dilation = SHAPES[shape]
    # Some padding, and an output even for one input sample.
    sizes = dict(stride=stride, padding=min(kernel_size // 2, 3), dilation=dilation, bias=True)
    return Problem(batch, in_channels, out_channels, kernel_size, length, **sizes)


@tensor_cores
@tensor_arithmetic
@shapes
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_rows(rung, dtype, precision, shape, off):
    full = 128 // SHAPES[shape][0]  # channels whose rows (nearly) fill a tile
    for length in (1, 128, 301):
        check(rung, problem_of(shape, 16, full + off, length), dtype, precision)


@tensor_cores
@tensor_arithmetic
@shapes
@pytest.mark.parametrize("in_channels", IN_CHANNELS)
def test_channels(rung, dtype, precision, shape, in_channels):
    for length in (1, 128, 301):
        check(rung, problem_of(shape, in_channels, 24, length), dtype, precision)


@tensor_cores
@tensor_arithmetic
@shapes
@pytest.mark.parametrize("groups", [1, 3])
def test_columns(rung, dtype, precision, shape, groups):
    """One sample and several, whose seams lie anywhere in a tile; with odd lengths few rows are aligned."""
    for length in LENGTHS:
        for batch in (1, 2, 5):
            problem = replace(problem_of(shape, 16 * groups, 24 * groups, length, batch), groups=groups)
            check(rung, problem, dtype, precision)


@tensor_cores
@tensor_arithmetic
@shapes
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, 129, 256, 301])
def test_layouts(rung, dtype, precision, shape, layout, length):
    for in_channels in (12, 16):  # a stage that lacks channels, and whole stages
        check(rung, problem_of(shape, in_channels, 24, length), dtype, precision, layout)


@tensor_cores
@tensor_arithmetic
@shapes
def test_an_output_that_begins_anywhere(rung, dtype, precision, shape):
    """Runs of outputs begin on sectors wherever the output does."""
    check_places(rung, problem_of(shape, 16, 24, 301), dtype, precision, range(17))
