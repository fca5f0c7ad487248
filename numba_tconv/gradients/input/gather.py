"""grad_input_gather: one thread an element of grad_input, for every problem on every GPU.

x[n, ci, i] reached the outputs ``i*stride - padding + k*dilation``: the gradient is a strided correlation of
grad_output with the weight. The range of taps is computed before the loops, which test nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from numba import cuda, types, uint64

from numba_tconv.gradients.rung import GradientRung
from numba_tconv.kernels.rung import SUM_CHANNELS, cuda_core_reason
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, alike, flat


@dataclass(frozen=True)
class Config:
    dtype: torch.dtype
    threads: int = 256


@cache
def make_kernel(config: Config) -> Kernel:
    element = ELEMENTS[config.dtype]
    load, store, accumulator = element.load, element.store, element.accumulator

    def grad_input_gather(
        g, g_n, g_c, g_l, w, w_i, w_o, w_k, grad, length, out_length, in_channels, in_per_group, out_per_group, taps,
        stride, padding, dilation,
    ):  # fmt: skip
        thread = cuda.grid(1)
        if thread >= grad.size:
            return
        row, i = divmod(thread, length)
        n, ci = divmod(row, in_channels)

        start = i * stride - padding  # the output that tap 0 reaches
        begin = max(0, -(start // dilation))
        end = min(taps, (out_length - 1 - start) // dilation + 1)

        # The longer loop is inside; its addresses advance by a constant.
        g_group = n * g_n + ci // in_per_group * out_per_group * g_c
        total = accumulator(0)
        for k in range(begin, end):
            g_at = g_group + (start + k * dilation) * g_l
            w_at = ci * w_i + k * w_k
            for c in range(0, out_per_group, SUM_CHANNELS):
                part = accumulator(0)
                for _ in range(min(SUM_CHANNELS, out_per_group - c)):
                    part += load(g[uint64(g_at)]) * load(w[uint64(w_at)])
                    g_at += g_c
                    w_at += w_o
                total += part
        grad[uint64(thread)] = store(total)

    stored, integers = flat(element.storage), (types.int64,)
    signature = (stored, *integers * 3, stored, *integers * 3, stored, *integers * 9)
    return Kernel("grad_input_gather", grad_input_gather, signature, config.threads, key=repr(config))


class InputGather(GradientRung):
    name = "grad_input_gather"
    of = "grad_input"
    idea = "one thread an element of grad_input; the taps whose output exists, no test in the loops"

    def supports(self, problem, dtype, precision):
        return cuda_core_reason(dtype, precision)

    def config(self, problem, dtype, device=None, precision=None):
        return Config(dtype)

    def tiny_configs(self, problem, dtype):
        return [Config(dtype, threads=32)]

    def kernels(self, config):
        return [(make_kernel(config), 0)]

    def prepare(self, grad_output, weight, result, problem, config=None, precision=None):
        config = config or self.config(problem, result.dtype)
        p, (g, w, gx) = problem, (alike(one.shape, one.dtype, one.strides) for one in (grad_output, weight, result))
        return make_kernel(config).prepare(
            -(-gx.numel() // config.threads),
            *(g, *g.stride(), w, *w.stride(), gx, p.length, p.out_length),
            *(p.in_channels, p.in_channels_per_group, p.out_channels_per_group, p.kernel_size),
            *(p.stride, p.padding, p.dilation),
        )
