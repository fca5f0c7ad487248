"""k6 without overlapping tiles, where a sample's last column is computed apart, on the GPU."""

import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.selection.registry import RUNGS
from tests.parity import LAYOUTS

from .common import able, check, tensor_arithmetic

pytestmark = pytest.mark.gpu

K6 = RUNGS["k6_wgmma"]
# Reason and problem. All leave one column of a sample over.
TAILS = {
    "a decoder's layer": Problem(3, 72, 40, 16, 128, stride=8, padding=4, bias=True),
    "unequal taps, two tiles": Problem(2, 40, 24, 11, 256, stride=5, padding=3, output_padding=1),
    "groups": Problem(5, 64, 48, 4, 128, stride=2, padding=1, groups=2, bias=True),
    "inputs that the column's taps do not meet": Problem(2, 33, 16, 24, 127, stride=4, padding=13),
    "weights that stream": Problem(2, 512, 256, 16, 256, stride=8, padding=4, bias=True),
}


def configs_of(problem, precision):
    """Highest tiles that compute each column once, with the last columns apart and without."""
    found = [config for config in k6_config.configs(problem, precision) if not config.tile.aligned]
    return [config for config in found if config.tile.rows == found[0].tile.rows]


@pytest.mark.parametrize("reason", TAILS)
@pytest.mark.parametrize("layout", LAYOUTS)
@tensor_arithmetic
def test_a_column_left_over(reason, layout, dtype, precision):
    problem = TAILS[reason]
    able(K6, problem, dtype, precision)
    configs = configs_of(problem, precision)
    several_chunks = configs[0].tile.several_chunks  # of taps, with split operands
    assert {config.tail for config in configs} == ({False} if several_chunks else {True, False})
    check(K6, problem, dtype, precision, layout, configs)
