"""A block of the simulator: what its threads do between barriers, and when one of them ends early or fails."""

import threading
import time

import numpy as np
import pytest
from numba import cuda

THREADS = 8


def test_nobody_passes_a_barrier_before_all_have_come():
    @cuda.jit
    def kernel(written, seen):
        thread = cuda.threadIdx.x
        for turn in range(3):
            time.sleep(0.002 * ((thread + turn) % THREADS))
            written[thread] = turn
            cuda.syncthreads()
            seen[turn, thread] = written.min()
            cuda.syncthreads()

    written, seen = np.full(THREADS, -1), np.full((3, THREADS), -1)
    kernel[1, THREADS](written, seen)
    assert seen.T.tolist() == [[0, 1, 2]] * THREADS


def test_threads_that_have_ended_are_not_waited_for():
    @cuda.jit
    def kernel(result):
        thread = cuda.threadIdx.x
        for turn in range(thread):
            cuda.syncthreads()
            result[thread] = turn + 1

    result = np.zeros(THREADS, int)
    kernel[2, THREADS](result)
    assert result.tolist() == list(range(THREADS))


def test_a_barrier_counts_the_threads_of_its_own_block():
    @cuda.jit
    def kernel(result):
        block, thread = cuda.blockIdx.x, cuda.threadIdx.x
        result[block, thread] = cuda.syncthreads_count(thread <= block)

    for threads in (THREADS, 2 * THREADS):  # of which half have served another block
        result = np.zeros((3, threads), int)
        kernel[3, threads](result)
        assert result.tolist() == [[block + 1] * threads for block in range(3)]


def test_neighbours_that_do_not_wait_are_met_too_early():
    """Whatever neighbour a thread reads from: of two passes in opposite order one is wrong."""

    def wrong(distance):
        @cuda.jit
        def kernel(written, seen):
            thread = cuda.threadIdx.x
            for turn in range(2):
                written[turn, thread] = 1
                seen[turn, thread] = written[turn, min(max(thread + distance, 0), THREADS - 1)]
                cuda.syncthreads()

        written, seen = np.zeros((2, THREADS), int), np.zeros((2, THREADS), int)
        kernel[1, THREADS](written, seen)
        return (seen == 0).any()

    assert [wrong(distance) for distance in (1, -1, 0)] == [True, True, False]


def test_what_is_no_error_ends_the_block_too():
    @cuda.jit
    def kernel():
        cuda.syncthreads()
        raise SystemExit(3)

    for _ in range(2):
        with pytest.raises(SystemExit):
            kernel[1, THREADS]()


@pytest.mark.parametrize("waiting", [False, True])
def test_a_failure_is_raised_and_ends_the_block(waiting):
    passed = []

    @cuda.jit
    def kernel():
        thread = cuda.threadIdx.x
        if thread == 3:
            raise ValueError("no")
        if waiting:
            cuda.syncthreads()
            passed.append(thread)

    @cuda.jit
    def nothing():
        pass

    nothing[1, THREADS]()  # its threads serve the next block
    before = threading.active_count()
    with pytest.raises(ValueError, match=r"tid=\[3, 0, 0\] ctaid=\[0, 0, 0\]: no"):
        kernel[1, THREADS]()
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline, "threads are left over"
        time.sleep(0.01)
    assert passed == []
