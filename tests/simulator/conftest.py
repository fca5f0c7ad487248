"""The simulator's threads, which are Python's, and problems small enough for them."""

import sys

import pytest

from numba_tconv.kernels import depthwise_config, depthwise_rows

# A block's threads are polled without a pause until all of them wait, so whoever polls keeps the interpreter from those
# that compute for as long as Python lets it. 5 ms, Python's own choice, are most of the time of a block.
sys.setswitchinterval(0.0002)


@pytest.fixture(autouse=True)
def few_blocks_are_enough(monkeypatch):
    """So a team takes several passes, as in a large problem."""
    monkeypatch.setattr(depthwise_rows, "ENOUGH_BLOCKS", 1)
    depthwise_config.plan.cache_clear()
    yield
    depthwise_config.plan.cache_clear()
