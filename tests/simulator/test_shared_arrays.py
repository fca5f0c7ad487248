"""The threads of a block share their arrays, whichever of them comes first."""

import time

import numpy as np
import pytest
from numba import cuda, float32

import numba_tconv  # noqa: F401  (mends the simulator)

THREADS = 8


@cuda.jit
def sums(result):
    shared = cuda.shared.array(THREADS, dtype=float32)
    shared[cuda.threadIdx.x] = cuda.threadIdx.x
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        total = 0
        for z in range(THREADS):
            total += shared[z]
        result[0] = total


@pytest.fixture
def slow_allocation(monkeypatch):
    """The other threads run before an array that is allocated can be found."""
    empty = np.empty

    def slow(*arguments, **options):
        array = empty(*arguments, **options)
        time.sleep(0.01)
        return array

    monkeypatch.setattr(np, "empty", slow)


def test_a_block_has_one_array(slow_allocation):
    result = np.zeros(1)
    sums[1, THREADS](result)
    assert result[0] == THREADS * (THREADS - 1) / 2
