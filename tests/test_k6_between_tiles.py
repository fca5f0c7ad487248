"""What a warpgroup of k6 does between two of its tiles, by PTX: it multiplies nothing then, so all of it counts."""

import re

import pytest

from numba_tconv import workloads
from numba_tconv.kernels import RUNGS
from numba_tconv.kernels.k6_split import choose
from numba_tconv.offline import loops
from tests.gpu.common import TENSOR_CORES

K6 = RUNGS["k6_wgmma"]
pytestmark = pytest.mark.skipif(K6 not in TENSOR_CORES, reason="the simulator has no tensor cores")


def test_nothing_divides():
    """Where weights are resident, a block's tile of rows and its channels stay; and columns are counted on."""
    config = choose(workloads.get("kb64").problem, "bf16")
    assert config.resident
    ptx = K6.kernel(config).kept_ptx((9, 0, "a"))
    products = ptx.count("wgmma.mma_async")
    over_tiles = max((loop for loop in loops(ptx) if loop.count("wgmma.mma_async") == products), key=len)
    assert products > 0
    assert "st.shared" in over_tiles, "outputs are staged in it, too"
    assert not re.search(r"\b(div|rem)\.", over_tiles)
