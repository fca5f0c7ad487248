"""The second stage of the gradients that are long sums: partial sums added up, always in the same order.

The first stage leaves one partial sum for every split of the reduction and element of the result; a thread adds up
those of one element. It does so in float64, so that however many splits there are, they cost no digit.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from numba import cuda, float64, types, uint64

from ..elements import ELEMENTS
from ..launch import Kernel, Prepared, alike, flat

THREADS = 128
BATCH = 8  # loads that a thread has under way


@cache
def make_kernel(dtype: torch.dtype) -> Kernel:
    element = ELEMENTS[dtype]
    store, accumulator = element.store, element.accumulator

    def grad_sum(partials, result, splits):
        e = cuda.grid(1)
        if e >= result.size:
            return
        values = cuda.local.array(BATCH, dtype=accumulator)
        total = float64(0)
        for first in range(0, splits, BATCH):
            for z in range(BATCH):
                at = (first + z) * result.size + e
                values[z] = partials[uint64(at)] if first + z < splits else accumulator(0)
            for z in range(BATCH):
                total += float64(values[z])
        result[uint64(e)] = store(accumulator(total))

    signature = (flat(accumulator), flat(element.storage), types.int64)
    return Kernel("grad_sum", grad_sum, signature, THREADS, key=str(dtype))


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    """What the kernels sum elements of ``dtype`` in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def workspace(result: torch.Tensor, splits: int) -> torch.Tensor:
    """Room for ``splits`` partial sums of every element of ``result``: the result itself, if one sum is all of it."""
    kind = accumulator_of(result.dtype)
    if splits == 1 and kind == result.dtype:
        return result
    return torch.empty(splits * result.numel(), dtype=kind, device=result.device)


def add_up(partials: torch.Tensor, result: torch.Tensor, splits: int) -> None:
    """Fill ``result`` from the partial sums, (splits, *result.shape), on the current stream."""
    if partials is not result:
        _prepared(result.numel(), result.dtype, splits)(partials, result)


@lru_cache(maxsize=1024)
def _prepared(elements: int, dtype: torch.dtype, splits: int) -> Prepared:
    partials = alike((splits * elements,), accumulator_of(dtype))
    return make_kernel(dtype).prepare(-(-elements // THREADS), partials, alike((elements,), dtype), splits)
