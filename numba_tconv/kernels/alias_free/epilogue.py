"""A tile's outputs, from the planes of activated up-samples."""

from typing import NamedTuple

from numba import cuda, int32, uint32, uint64

from numba_tconv.ptx import device_function, load_vector, multiply_add, store_run
from numba_tconv.runtime.elements import ELEMENTS

from .tile import Config


class Registers(NamedTuple):
    """A thread's local arrays."""

    values: object  # windows of all planes
    sums: object
    down: object  # the filter down


def make_epilogue(config: Config):
    """Build ``begin_sums``: products of own up-samples, at the same ratio; and ``store_tile``: the others."""
    element, run, vector, threads = ELEMENTS[config.dtype], config.run, config.vector, config.threads
    store, accumulator, outputs = element.store, element.accumulator, config.outputs
    plane, stride = config.plane, config.stride
    down_window, down_ratio, rounds = config.down.window, config.down_ratio, -(-outputs // config.positions)
    same_ratio, known = config.same_ratio, run if config.same_ratio else 0
    multiply_own = multiply_add((config.down.own(),))
    multiply_others = multiply_add((config.down.others() if same_ratio else config.down.products,))
    place = device_function(config.place)
    stored = min(run, 16 // config.dtype.itemsize)
    put = store_run(element, stored)

    @device_function
    def begin_sums(sums, down, values):
        for z in range(run):
            sums[z] = accumulator(0)
        multiply_own(sums, down, values, 0)

    @device_function
    def store_tile(y, target, length, registers, planes, begin):
        thread, begin, length = int32(cuda.threadIdx.x), int32(begin), int32(length)
        for r in range(rounds):
            o = int32((thread + r * threads) * run)
            if o < outputs:
                own = uint32((thread + r * threads) * stride)
                for v in range(known, down_window, vector):
                    at = own + place(uint32(v))
                    for q in range(down_ratio):
                        load_vector(registers.values, q * down_window + v, planes, q * plane + at)
                if not same_ratio:
                    for z in range(run):
                        registers.sums[z] = accumulator(0)
                multiply_others(registers.sums, registers.down, registers.values, 0)
                first = int32(begin + o)
                if first >= 0 and int32(first + run) <= length:
                    for z in range(0, run, stored):
                        put(y, target + first + z, registers.sums, z)
                else:
                    for z in range(run):
                        if uint32(first + z) < uint32(length):
                            y[uint64(target + first + z)] = store(registers.sums[z])

    return begin_sums, store_tile
