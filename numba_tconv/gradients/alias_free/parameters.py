"""Gradients of alpha and beta from blocks' sums, in float64 and a fixed order."""

import math
from functools import cache

import torch
from numba import cuda, float64, int32, types, uint64

from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, flat

from .epilogue import make_add_up

THREADS = 64


@cache
def make_kernel(dtype: torch.dtype, log_scale: bool, tied: bool) -> Kernel:
    """``tied``: beta is alpha, whose gradient is the sum of both."""
    element, threads, room = ELEMENTS[dtype], THREADS, 2 * THREADS
    load, store, accumulator = element.load, element.store, element.accumulator
    add_up = make_add_up(threads)

    def alias_free_parameters(partials, alpha, beta, grad_alpha, grad_beta, splits):
        shared = cuda.shared.array(room, dtype=float64)
        thread, channel = int32(cuda.threadIdx.x), uint64(cuda.blockIdx.x)
        first, others = channel * uint64(splits), uint64(alpha.size) * uint64(splits)
        of_alpha, of_beta = float64(0), float64(0)
        for split in range(thread, splits, threads):
            of_alpha += float64(partials[first + uint64(split)])
            of_beta += float64(partials[others + first + uint64(split)])
        add_up(shared, of_alpha, of_beta)
        if thread == 0:
            a, b = float64(load(alpha[channel])), float64(load(beta[channel]))
            scale_a, scale_b = float64(1), float64(1)
            if log_scale:
                a, b = math.exp(a), math.exp(b)
                scale_a, scale_b = a, b
            inverse = 1.0 / (b + 1e-9)
            found_alpha = 2.0 * scale_a * inverse * shared[0]
            found_beta = -scale_b * inverse * inverse * shared[threads]
            if tied:
                grad_alpha[channel] = store(accumulator(found_alpha + found_beta))
            else:
                grad_alpha[channel] = store(accumulator(found_alpha))
                grad_beta[channel] = store(accumulator(found_beta))

    data = flat(element.storage)
    signature = (flat(accumulator), data, data, data, data, types.int64)
    return Kernel("alias_free_parameters", alias_free_parameters, signature, threads, key=f"{dtype} {log_scale} {tied}")
