"""grad_input_gather: one thread an element.

Element i meets the outputs ``i*stride - padding + k*dilation``; the range of k is known before the loops."""

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from numba import cuda, uint64

from numba_tconv.gradients.rung import GradientRung
from numba_tconv.kernels.common.arguments import Signal, Weights, arguments, of_problem, signal_like, weights_like
from numba_tconv.kernels.rung import SUM_CHANNELS
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, alike, flat


@dataclass(frozen=True)
class Config:
    dtype: torch.dtype
    threads: int = 256


class Sizes(NamedTuple):
    length: int
    out_length: int
    in_channels: int
    in_channels_per_group: int
    out_channels_per_group: int
    kernel_size: int
    stride: int
    padding: int
    dilation: int


@cache
def make_kernel(config: Config) -> Kernel:
    element = ELEMENTS[config.dtype]
    load, store, accumulator = element.load, element.store, element.accumulator

    def grad_input_gather(grad_output, weight, grad_input, sizes):
        thread = cuda.grid(1)
        if thread >= grad_input.size:
            return
        row, i = divmod(thread, sizes.length)
        n, ci = divmod(row, sizes.in_channels)

        first_output = i * sizes.stride - sizes.padding
        first_tap = max(0, -(first_output // sizes.dilation))
        end = min(sizes.kernel_size, (sizes.out_length - 1 - first_output) // sizes.dilation + 1)

        # The longer loop is inside, with constant steps.
        first_co = ci // sizes.in_channels_per_group * sizes.out_channels_per_group
        group = n * grad_output.stride_n + first_co * grad_output.stride_c
        total = accumulator(0)
        for k in range(first_tap, end):
            g = group + (first_output + k * sizes.dilation) * grad_output.stride_l
            w = ci * weight.stride_i + k * weight.stride_k
            for c in range(0, sizes.out_channels_per_group, SUM_CHANNELS):
                part = accumulator(0)
                for _ in range(min(SUM_CHANNELS, sizes.out_channels_per_group - c)):
                    part += load(grad_output.data[uint64(g)]) * load(weight.data[uint64(w)])
                    g += grad_output.stride_c
                    w += weight.stride_o
                total += part
        grad_input[uint64(thread)] = store(total)

    data = flat(element.storage)
    signature = arguments(Signal, data=data), arguments(Weights, data=data), data, arguments(Sizes)
    return Kernel("grad_input_gather", grad_input_gather, signature, config.threads, key=repr(config))


class InputGather(GradientRung):
    name = "grad_input_gather"
    most_stride = 2**63
    of = "grad_input"
    idea = "one thread an element of grad_input; the taps whose output exists, no test in the loops"
    make_kernel = staticmethod(make_kernel)

    def config(self, problem, dtype, device=None, precision=None):
        return Config(dtype)

    def tiny_configs(self, problem, dtype):
        return [Config(dtype, threads=32)]

    def prepare(self, grad_output, weight, result, problem, config=None, precision=None):
        config = config or self.config(problem, result.dtype)
        return make_kernel(config).prepare(
            -(-math.prod(result.shape) // config.threads),
            *(signal_like(grad_output), weights_like(weight)),
            *(alike(result.shape, result.dtype), of_problem(Sizes, problem)),
        )
