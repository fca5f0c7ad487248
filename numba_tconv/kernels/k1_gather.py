"""k1: the definition, one thread an output.

A scatter would need atomics. Tap k reaches output o if ``o + padding - k*dilation`` is a multiple of the stride.

Measured (H200, kb64, float32): 1274 ms."""

from dataclasses import dataclass
from functools import cache

import torch
from numba import cuda, types

from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, contiguous, strided

from .rung import SUM_CHANNELS, Rung


@dataclass(frozen=True)
class Config:
    dtype: torch.dtype
    threads: int = 256


@cache
def make_kernel(config: Config) -> Kernel:
    element = ELEMENTS[config.dtype]
    load, store, accumulator = element.load, element.store, element.accumulator

    def k1_gather(x, w, bias, has_bias, y, stride, padding, dilation, groups):
        batch, out_channels, out_length = y.shape
        in_per_group, out_per_group, taps = x.shape[1] // groups, w.shape[1], w.shape[2]
        thread = cuda.grid(1)
        if thread >= batch * out_channels * out_length:
            return
        n, within = divmod(thread, out_channels * out_length)
        co, o = divmod(within, out_length)
        group, co_in_group = divmod(co, out_per_group)

        total = load(bias[co]) if has_bias else accumulator(0)
        for begin in range(0, in_per_group, SUM_CHANNELS):
            part = accumulator(0)
            for c in range(begin, min(begin + SUM_CHANNELS, in_per_group)):
                ci = group * in_per_group + c
                channel_sum = accumulator(0)
                for k in range(taps):
                    distance = o + padding - k * dilation
                    if distance >= 0 and distance % stride == 0:
                        i = distance // stride
                        if i < x.shape[2]:
                            channel_sum += load(x[n, ci, i]) * load(w[ci, co_in_group, k])
                part += channel_sum
            total += part
        y[n, co, o] = store(total)

    stored = element.storage
    signature = (strided(stored, 3), strided(stored, 3), strided(stored, 1), types.int64, contiguous(stored, 3))
    return Kernel("k1_gather", k1_gather, signature + (types.int64,) * 4, config.threads, key=repr(config))


class Gather(Rung):
    name = "k1_gather"
    most_stride = 2**63
    idea = "one thread an output; every tap is tested for divisibility by the stride"
    make_kernel = staticmethod(make_kernel)

    def config(self, problem, dtype, precision=None):
        return Config(dtype)

    def tile(self, config):
        return f"{config.threads} outputs, one a thread"

    def tiny_configs(self, problem, dtype):
        return [Config(dtype, threads=32)]

    def run(self, x, w, bias, y, problem, config=None, precision=None):
        config = config or self.config(problem, x.dtype)
        p = problem
        self.kernel(config).launch(
            -(-y.numel() // config.threads),
            *(x, w, w[0, :, 0] if bias is None else bias, bias is not None, y),
            *(p.stride, p.padding, p.dilation, p.groups),
        )
