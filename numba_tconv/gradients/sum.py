"""The second stage of long sums, in float64 and a fixed order."""

import math
from collections.abc import Callable
from functools import cache, lru_cache

import torch
from numba import cuda, float64, types, uint64

from numba_tconv.kernels.rung import Step
from numba_tconv.runtime.device import H200
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat
from numba_tconv.runtime.layout import Layout, room

from .rung import GradientRung

THREADS = 128
BATCH = 8  # loads in flight


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
                partial = (first + z) * result.size + e
                values[z] = partials[uint64(partial)] if first + z < splits else accumulator(0)
            for z in range(BATCH):
                total += float64(values[z])
        result[uint64(e)] = store(accumulator(total))

    signature = (flat(accumulator), flat(element.storage), types.int64)
    return Kernel("grad_sum", grad_sum, signature, THREADS, key=str(dtype))


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class SummedRung(GradientRung):
    """Splits' sums are added up."""

    def steps(self, config, problem, device=H200):
        return [*super().steps(config, problem, device), Step("add up", make_kernel(config.dtype))]


def added_up(launch: Callable, result: Layout, splits: int) -> Callable:
    """A function of operands and result: ``launch(*operands, partials)``, partials (splits, *shape), then the second
    stage."""
    kind, elements = accumulator_of(result.dtype), math.prod(result.shape)
    if splits == 1 and kind == result.dtype:
        return launch
    partials_room = room((splits * elements,), kind, result.index)
    add_up = _prepared(elements, result.dtype, splits)

    def fill(*operands_and_result):
        *operands, result = operands_and_result
        partials = partials_room()
        launch(*operands, partials)
        add_up(partials, result)

    return fill


@lru_cache(maxsize=1024)
def _prepared(elements: int, dtype: torch.dtype, splits: int) -> Prepared:
    partials = alike((splits * elements,), accumulator_of(dtype))
    return make_kernel(dtype).prepare(-(-elements // THREADS), partials, alike((elements,), dtype), splits)
