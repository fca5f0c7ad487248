"""k6 in tf32x3 where producers split x, on the CPU: when they do, and the compiled code."""

import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core.tile import make_tile
from numba_tconv.kernels.k6_wgmma import choose as k6_choose
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.lab.machine_code import offline
from numba_tconv.lab.measure import workloads
from numba_tconv.ptx import SIMULATOR
from numba_tconv.selection.registry import RUNGS

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")


@pytest.mark.parametrize(
    ("problem", "taps", "window", "ahead"),
    [
        (Problem(2, 32, 64, 1, 300), 1, 4, False),
        (Problem(2, 32, 64, 3, 300), 3, 8, False),
        (Problem(2, 32, 64, 4, 300), 4, 8, True),
        (Problem(2, 32, 64, 5, 300), 5, 8, True),
        (Problem(2, 32, 64, 7, 300), 4, 8, True),  # in two chunks
        (Problem(2, 32, 64, 5, 300, dilation=3), 5, 16, True),
        (Problem(2, 32, 64, 3, 300, dilation=4), 3, 12, False),
        (Problem(2, 32, 64, 3, 300, dilation=6), 3, 16, True),
        (Problem(2, 32, 64, 3, 300, dilation=7), 2, 12, False),
        (Problem(2, 32, 64, 8, 300, stride=4), 2, 8, False),
        (Problem(2, 32, 64, 16, 300, stride=4), 4, 8, True),
    ],
)
def test_operands_are_split_ahead_for_many_taps_and_wide_windows(problem, taps, window, ahead):
    for config in k6_config.configs(problem, "tf32x3"):
        tile = config.tile
        assert (tile.tap_chunk, 4 + tile.halo, config.split_ahead) == (taps, window, ahead)
    assert not any(config.split_ahead for config in k6_config.configs(problem, "tf32"))


def test_windows_are_wider_in_k6_alone():
    """k5's lanes, which split what they read, have no registers for them."""
    assert make_tile(workloads.get("kb74").problem, "tf32x3").tap_chunk == 3


@pytest.mark.parametrize("workload", [name for name, w in workloads.WORKLOADS.items() if w.problem.groups == 1])
def test_the_mbarriers_have_room(workload):
    """For each stage one that says split, and two windows' inverse scales, before the tensor map."""
    for config in k6_config.configs(workloads.get(workload).problem, "tf32x3"):
        assert config.ready % 8 == 0
        assert config.ready >= config.barriers + 8 * (2 * config.stages + 5)
        needed = 16 * config.stages if config.split_ahead else 0
        assert config.ready + needed <= config.map <= config.shared_bytes - 128
        assert config.shared_bytes <= k6_config.SHARED_PER_BLOCK


@pytest.mark.thorough
def test_warps_that_multiply_split_nothing():
    """That none of its registers is spilled, test_offline.py says."""
    config = k6_choose.choose(workloads.get("kb74").problem, "tf32x3")
    assert config.split_ahead
    ptx = RUNGS["k6_wgmma"].kernel(config).kept_ptx((9, 0, "a"))
    of_products = [loop for loop in offline.loops(ptx) if "wgmma.mma_async" in loop]
    assert of_products
    assert not any("cvt.rn.f16x2.f32" in loop for loop in of_products)
    # One piece of code splits both windows of a stage: two vectors of a pair of rows at a time, or one.
    assert ptx.count("cvt.rn.f16x2.f32") == ptx.count("cvt.f32.f16") == 8 * (2 + 1)
    assert ptx.count("redux.sync.max.u32") == 2, "one more for windows beside an infinity"
