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


def test_what_nobody_wrote_is_nan():
    """It shows where it is used; a remnant of other memory may even be out of a function's range."""

    @cuda.jit
    def read(result):
        shared = cuda.shared.array(THREADS, dtype=float32)
        shared[0] = 1
        for z in range(THREADS):
            result[z] = shared[z]

    result = np.zeros(THREADS)
    read[1, 1](result)
    assert np.isnan(result).tolist() == [False] + [True] * (THREADS - 1)


PUT = """
@cuda.jit(device=True)
def put(value):
    shared = cuda.shared.array(1, dtype=float32)
    shared[0] = value
    return shared
"""


def test_arrays_of_the_same_line_of_two_files_are_two():
    def put_of(file):
        names = {"cuda": cuda, "float32": float32}
        exec(compile(PUT, file, "exec"), names)
        return names["put"]

    first, second = put_of("first.py"), put_of("second.py")

    @cuda.jit
    def both(result):
        one, other = first(1), second(2)
        result[0], result[1] = one[0], other[0]

    result = np.zeros(2)
    both[1, 1](result)
    assert result.tolist() == [1, 2]
