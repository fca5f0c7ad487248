"""A tile's outputs, from the planes of activated up-samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from numba import cuda, int32, uint32, uint64

from numba_tconv.ptx import device_function, load_vector, multiply_add, store_run
from numba_tconv.runtime.elements import ELEMENTS

from .tile import Config


class Registers(NamedTuple):
    """A thread's."""

    values: object  # windows of all planes
    sums: object
    down: object  # the filter down


def make_store(config: Config) -> Callable:
    """(y, target, length, registers, planes, begin): ``target``: a row's first element; ``begin``: a tile's output."""
    element, run, vector, threads = ELEMENTS[config.dtype], config.run, config.vector, config.threads
    store, accumulator, outputs, plane = element.store, element.accumulator, config.outputs, config.plane
    down_window, down_ratio, rounds = config.down.window, config.down_ratio, -(-outputs // config.positions)
    place, multiply_down = device_function(config.place), multiply_add((config.down.products,))
    stored = min(run, 16 // config.dtype.itemsize)
    put = store_run(element, stored)

    @device_function
    def store_tile(y, target, length, registers, planes, begin):
        thread, begin, length = int32(cuda.threadIdx.x), int32(begin), int32(length)
        for turned in range(rounds):
            o = int32((thread + turned * threads) * run)
            if o < outputs:
                for v in range(0, down_window, vector):
                    at = place(uint32(o + v))
                    for q in range(down_ratio):
                        load_vector(registers.values, q * down_window + v, planes, q * plane + at)
                for z in range(run):
                    registers.sums[z] = accumulator(0)
                multiply_down(registers.sums, registers.down, registers.values, 0)
                first = int32(begin + o)
                if first >= 0 and int32(first + run) <= length:
                    for z in range(0, run, stored):
                        put(y, target + first + z, registers.sums, z)
                else:
                    for z in range(run):
                        if uint32(first + z) < uint32(length):
                            y[uint64(target + first + z)] = store(registers.sums[z])

    return store_tile
