"""How k6 takes its input, on the CPU: what copies hold, and when there are any."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.kernels.common import rows as row_copy
from numba_tconv.kernels.k6_wgmma import choose as k6_choose
from numba_tconv.kernels.k6_wgmma import input as k6_input
from numba_tconv.kernels.k6_wgmma.boxes import RowAlignment
from numba_tconv.lab.measure import workloads
from numba_tconv.ptx import SIMULATOR

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")

HEAD, WAVEGLOW = (workloads.get(name).problem for name in ("head", "waveglow"))
SAMPLES = 0, 128


def contiguous(*shape):
    _, channels, length = shape
    return shape, (channels * length, length, 1), 0


def taken(problem, precision, layout, groups=1):
    return k6_input.input_of(*layout, k6_choose.choose_whole(problem, precision), groups, SAMPLES)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_what_a_map_describes_is_not_copied(precision):
    every = 4 if precision == "tf32" else 8
    assert taken(HEAD, precision, contiguous(1, 512, 88)).copy is None
    odd = taken(HEAD, precision, contiguous(1, 512, 87))
    assert (odd.copy, odd.rows, odd.strides) == (None, RowAlignment(every, 87 % every, False), (512 * 87, 87, 1))
    # No map describes samples that begin anywhere, or elements that lie apart, or more rows than fill its classes.
    apart = taken(HEAD, precision, ((1, 512, 87), (1, 1, 512), 0))
    assert (apart.copy, apart.rows, apart.strides) == (row_copy.to_rows, RowAlignment(), (512 * 88, 88, 1))
    assert taken(HEAD, precision, contiguous(2, 513, 100_001)).copy == row_copy.to_rows
    assert taken(HEAD, precision, contiguous(1, 514, 100_001)).copy == row_copy.to_rows
    assert taken(HEAD, precision, ((1, 512, 100_000), (1, 1, 512), 0)).copy == row_copy.to_rows


def test_groups_whose_channels_fill_no_stage_are_not_copied_for_a_map():
    """They are filled row by row, from rows of adjacent elements."""
    assert taken(HEAD, "tf32", contiguous(1, 24, 87), groups=2).copy is None
    apart = (1, 24, 87), (1, 1, 24), 0
    assert taken(HEAD, "tf32", apart, groups=2).copy == k6_input.to_contiguous
    assert taken(HEAD, "tf32", apart, groups=2).strides == (24 * 87, 87, 1)
    misaligned = torch.randn(24 * 87 + 1)[1:].view(1, 24, 87)
    assert k6_input.to_contiguous(misaligned).data_ptr() != misaligned.data_ptr()


def test_short_samples_are_joined_where_that_is_cheaper():
    for precision in ("tf32", "bf16"):
        assert k6_choose.choose_whole(WAVEGLOW, precision).joined
        assert not k6_choose.choose_whole(replace(WAVEGLOW, batch=1), precision).joined
        assert not k6_choose.choose_whole(workloads.get("istft").problem, precision).joined


def test_the_model_knows_what_the_input_costs():
    config, odd = k6_choose.choose_whole(HEAD, "tf32"), (1, 512, 87)
    assert k6_input.cost((1, 512, 88), config, 1, SAMPLES) == 0
    assert k6_input.cost(odd, config, 1, SAMPLES) == 0
    behind = (1, 514, 87)
    assert k6_input.cost(behind, config, 1, SAMPLES) == k6_input.copy_ms(behind, config)
