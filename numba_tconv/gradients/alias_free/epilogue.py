"""x's gradient from the planes of the up-samples', and a block's sums of alpha's and beta's."""

from numba import cuda, int32, uint64

from numba_tconv.ptx import device_function, load_vector, multiply_add, store_run
from numba_tconv.runtime.elements import ELEMENTS

from .ends import Ends
from .tile import Config


def make_store(config: Config, ends: Ends):
    """Build (output, registers, up_filter, planes, begin, origin), which writes a tile of x's gradient.

    ``begin``: its first output; ``origin``: the up-sample of entry 0 of plane 0."""
    element, run, vector, threads = ELEMENTS[config.dtype], config.run, config.vector, config.threads
    accumulator, store, pad = element.accumulator, element.store, config.sizes.pad
    outputs, up_ratio, plane, down_window = config.outputs, config.up_ratio, config.plane, config.down.window
    multiply_down, repetitions = multiply_add((config.down.products,)), ends.repetitions
    stored = min(run, 16 // config.dtype.itemsize)
    put = store_run(element, stored)

    @device_function
    def store_tile(output, registers, up_filter, planes, begin, origin):
        thread, length, begin = int32(cuda.threadIdx.x), int32(output.length), int32(begin)
        up_length = int32(length * up_ratio)
        down_values, dx = registers.down_values, registers.dx
        for o in range(thread * run, outputs, threads * run):
            for q in range(up_ratio):
                for v in range(0, down_window, vector):
                    load_vector(down_values, q * down_window + v, planes, q * plane + o + v)
            for z in range(run):
                dx[z] = accumulator(0)
            multiply_down(dx, registers.up, down_values, 0)
            first = int32(begin + o)
            if first > 0 and first + run < length:
                for z in range(0, run, stored):
                    put(output.data, output.target + first + z, dx, z)
            else:
                head, tail = accumulator(0), accumulator(0)
                if first <= 0 and first + run > 0:
                    head = repetitions(up_filter, planes, -pad, 0, origin, up_length)
                if first < length and first + run >= length:
                    tail = repetitions(up_filter, planes, length, length + pad, origin, up_length)
                for z in range(run):
                    i = int32(first + z)
                    value = dx[z]
                    if i == 0:
                        value += head
                    if i == length - 1:
                        value += tail
                    if i >= 0 and i < length:
                        output.data[uint64(output.target + i)] = store(value)

    return store_tile


def make_add_up(threads: int):
    """Build (shared, alpha, beta): a block's sums, at elements 0 and ``threads`` of ``shared``.

    ``threads``: of the block, a power of two."""
    halvings = threads.bit_length() - 1

    @device_function
    def add_up(shared, of_alpha, of_beta):
        thread = int32(cuda.threadIdx.x)
        shared[thread], shared[threads + thread] = of_alpha, of_beta
        for h in range(halvings):
            cuda.syncthreads()
            half = threads >> (h + 1)
            if thread < half:
                shared[thread] += shared[thread + half]
                shared[threads + thread] += shared[threads + thread + half]

    return add_up
