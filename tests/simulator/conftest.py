"""The simulator's threads, which are Python's, and problems small enough for them."""

import sys

import pytest

from numba_tconv.kernels import k4_pack, weight_cache
from tests.few_blocks import few_blocks_are_enough, few_threads

# A block's threads are polled without a pause until all of them wait, so whoever polls keeps the interpreter from those
# that compute for as long as Python lets it. 5 ms, Python's own choice, are most of the time of a block.
sys.setswitchinterval(0.0002)


@pytest.fixture(autouse=True)
def several_passes():
    with few_blocks_are_enough():
        yield


@pytest.fixture(autouse=True, scope="session")
def tiny_stages():
    """Tiny tiles have stages of few weights, each of which a block packs."""
    with few_threads(k4_pack, 32, weight_cache._made):
        yield
