"""A tile's part of a row, copied to shared memory."""

from collections.abc import Callable

from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.ptx import device_function
from numba_tconv.runtime.elements import Element


def make_fetch(element: Element, count: int, threads: int, pad: int) -> Callable:
    """(shared, signal, source, first, length): ``shared[i]`` is sample ``first + i`` for i below ``count``.

    ``source``: index of the row's sample 0. A row's ends are repeated ``pad`` times, with zeros beyond."""
    load, accumulator = element.load, element.accumulator
    loads = -(-count // threads)

    @device_function
    def fetch(shared, signal, source, first, length):
        thread = int32(cuda.threadIdx.x)
        if first >= 0 and first + count <= length:
            inside = source + int64(first) * signal.stride_l
            for z in range(loads):
                i = int32(thread + z * threads)
                if i < count:
                    shared[uint32(i)] = load(signal.data[uint64(inside + i * signal.stride_l)])
        else:
            for i in range(thread, count, threads):
                j = int32(first + i)
                nearest = min(max(j, int32(0)), int32(length - 1))
                value = load(signal.data[uint64(source + int64(nearest) * signal.stride_l)])
                shared[i] = value if j >= -pad and j < length + pad else accumulator(0)

    return fetch
