"""The largest weight, which scales split operands: a number a block; packing takes the largest."""

from collections.abc import Callable
from functools import cache

import torch
from numba import cuda, float32, int32, int64, uint64

from numba_tconv.ptx import device_function, griddepcontrol_launch_dependents
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, alike, flat
from numba_tconv.runtime.layout import Layout, room

from .split_operand import larger_finite

THREADS = 1024
BATCH = 8  # loads in flight


def make_largest_of_block(threads: int) -> Callable:
    """Build ``largest_of_block(shared, value)``: the largest of the threads' values, for each thread."""

    @device_function
    def largest_of_block(shared, value):
        thread, left = int32(cuda.threadIdx.x), int32(threads)
        shared[thread] = value
        while left > 1:
            cuda.syncthreads()
            half = int32((left + 1) >> 1)
            if thread + half < left:
                shared[thread] = max(shared[thread], shared[thread + half])
            left = half
        cuda.syncthreads()
        return shared[0]

    return largest_of_block


@cache
def make_kernel() -> Kernel:
    threads = THREADS
    largest_of_block = make_largest_of_block(threads)

    def largest_weights(w, largest):
        griddepcontrol_launch_dependents()
        shared = cuda.shared.array(threads, dtype=float32)
        values = cuda.local.array(BATCH, dtype=float32)
        hop, last = int64(cuda.gridDim.x) * threads, int64(w.shape[0] - 1)
        e = int64(cuda.blockIdx.x) * threads + int64(cuda.threadIdx.x)
        found = float32(0)
        while e <= last:
            for z in range(BATCH):
                values[z] = w[uint64(min(e + z * hop, last))]
            for z in range(BATCH):
                found = larger_finite(found, values[z])
            e += BATCH * hop
        found = largest_of_block(shared, found)
        if cuda.threadIdx.x == 0:
            largest[uint64(cuda.blockIdx.x)] = found

    data = flat(ELEMENTS[torch.float32].storage)
    return Kernel("largest_weights", largest_weights, (data, data), threads, key="float32")


def finder(w: Layout, most: int) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    """A function of float32 weights like ``w``: up to ``most`` magnitudes, with the largest finite one; how many."""
    if not w.is_dense:
        return _by_torch, 1
    weights = alike(w.shape, w.dtype, w.strides)
    blocks = min(most, -(-weights.numel() // (THREADS * BATCH)))
    launch = make_kernel().prepare(blocks, weights, alike((blocks,), w.dtype))
    numbers = room((blocks,), w.dtype, w.index)

    def find(w):
        found = numbers()
        launch(w, found)
        return found

    return find, blocks


def _by_torch(w: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.nan_to_num(w, nan=0, posinf=0, neginf=0), torch.inf).reshape(1)
