"""Store through shared memory, to consecutive positions."""

import math
from collections.abc import Callable

from numba import cuda, int32, uint64

from numba_tconv.gradients.window import locate
from numba_tconv.kernels.common.register_tile import make_sums
from numba_tconv.ptx import device_function, store_vector
from numba_tconv.runtime.elements import ELEMENTS

from .tile import Config


def make_store(config: Config) -> Callable:
    vector, vector_m, block_m, block_n = config.vector, config.vector_m, config.block_m, config.block_n
    thread_m, thread_n, lanes_m, pitch = config.thread_m, config.thread_n, config.lanes_m, config.result_pitch
    lanes = math.gcd(block_n, config.threads)
    rows_at_once = config.threads // lanes
    element = ELEMENTS[config.dtype]
    convert, accumulator = element.store, element.accumulator
    _, copy_sums = make_sums(thread_n, vector, config.exchanged)

    @device_function
    def store(sums, shared, block, grad_input, sizes, grid):
        cuda.syncthreads()  # the stages are free
        values = cuda.local.array(vector, dtype=accumulator)
        for m in range(thread_m):
            row = block.row + m // vector_m * (vector_m * lanes_m) + m % vector_m
            for n in range(0, thread_n, vector):
                copy_sums(values, sums, m, n)
                store_vector(shared, row * pitch + block.column + n, values, 0)
        cuda.syncthreads()
        first_row = block.row_tile * block_m
        rows_left = int32(min(block_m, sizes.in_channels_per_group - first_row))
        e = int32(block.thread % lanes)
        while e < block_n:
            n, i = locate(block.sample, block.position, e, grid.columns)
            if n < sizes.batch and i < sizes.length:
                m = int32(block.thread // lanes)
                row = (n * sizes.groups + block.group) * sizes.in_channels_per_group + first_row + m
                target = row * sizes.length + i
                while m < rows_left:
                    grad_input[uint64(target)] = convert(shared[uint64(m * pitch + e)])
                    target += rows_at_once * sizes.length
                    m = int32(m + rows_at_once)
            e = int32(e + lanes)

    return store
