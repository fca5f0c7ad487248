"""A consumer warpgroup's PTX between two tiles, where it multiplies nothing."""

import re

import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.k6_wgmma.choose import choose
from numba_tconv.lab.machine_code.offline import loops
from numba_tconv.lab.measure import workloads
from numba_tconv.selection.registry import RUNGS
from tests.gpu.common import TENSOR_CORES

K6 = RUNGS["k6_wgmma"]
pytestmark = pytest.mark.skipif(K6 not in TENSOR_CORES, reason="the simulator has no tensor cores")


def over_tiles(config):
    """PTX of the loop over tiles."""
    ptx = K6.kernel(config).kept_ptx((9, 0, "a"))
    products = ptx.count("wgmma.mma_async")
    loop = max((loop for loop in loops(ptx) if loop.count("wgmma.mma_async") == products), key=len)
    assert products > 0
    assert "st.shared" in loop, "outputs are staged in it, too"
    return loop


@pytest.mark.thorough
def test_nothing_divides():
    """With resident weights, a block's row tile and channels stay; columns are counted on."""
    config = choose(workloads.get("oobleck_u4").problem, "bf16")
    assert config.resident
    assert not re.search(r"\b(div|rem)\.", over_tiles(config))


def tiles_found(config):
    """The tile loop's text, and where the next tile's sample is found, by 64-bit divisions."""
    assert not config.resident, "tiles of resident weights are counted on"
    loop = over_tiles(config)
    found = [place.start() for place in re.finditer(r"\b(div|rem)\.[su]64", loop)]  # of columns, by their number
    assert found
    assert loop.rindex("wgmma.mma_async") < min(found)
    return loop, found


@pytest.mark.thorough
def test_the_next_tile_is_found_while_the_last_products_run():
    loop, found = tiles_found(choose(Problem(4, 512, 512, 3, 4096), "tf32"))
    assert max(found) < loop.index("wgmma.wait_group.sync.aligned 0")


def test_with_several_phases_it_is_found_when_the_outputs_are_stored():
    loop, found = tiles_found(choose(workloads.get("hifigan_u1").problem, "tf32"))
    assert loop.rindex("st.shared") < min(found)


def test_runs_that_are_held_leave_after_the_last_tile():
    config = choose(workloads.get("hifigan_u1").problem, "tf32")
    assert config.bulk_channels
    _, after = K6.kernel(config).kept_ptx((9, 0, "a")).split(over_tiles(config))
    assert after.index("cp.async.bulk.global.shared::cta") < after.index("cp.async.bulk.wait_group.read 0;")
