"""These tests need the simulator, and problems small enough for its threads, which are Python's."""

import pytest

from numba_tconv.kernels.common import packed_weights, split_sums
from numba_tconv.kernels.k4_register_tile import pack as k4_pack
from numba_tconv.ptx import SIMULATOR
from tests.few_blocks import few_blocks_are_enough, few_threads


@pytest.fixture(autouse=True, scope="session")
def simulator():
    if not SIMULATOR:
        pytest.skip("needs NUMBA_ENABLE_CUDASIM=1")


@pytest.fixture(autouse=True)
def several_passes():
    with few_blocks_are_enough():
        yield


@pytest.fixture(autouse=True, scope="session")
def tiny_stages():
    """Tiny tiles have stages of few weights, each of which a block packs, and few partial sums."""
    with few_threads(k4_pack, 32, packed_weights._made), few_threads(split_sums, 8):
        yield
