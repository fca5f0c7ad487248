"""k2: one thread an output, and only the taps that reach it.

The taps of an output's phase form an arithmetic progression (formula/taps.py). Its start and the bounds of the signal
are computed before the loop, which has no test and no remainder. Threads of a warp take consecutive outputs: stores and
loads of x coalesce, and loads of w hit one cache line.

Per multiply-add: two loads, nearly always from L1. A multiprocessor takes one load a clock and four multiply-adds, so
k2 reaches at most an eighth of the arithmetic peak.

Measured (H200, kb64, float32): 154 ms, 8.3 times k1."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from numba import cuda, types, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat, strided

from .rung import SUM_CHANNELS, Rung, are_adjacent, cuda_core_reason, taking_bias


@dataclass(frozen=True)
class Config:
    dtype: torch.dtype
    threads: int = 256


@cache
def make_kernel(config: Config) -> Kernel:
    element = ELEMENTS[config.dtype]
    load, store, accumulator = element.load, element.store, element.accumulator

    def k2_polyphase(
        x, x_n, x_c, x_l, w, w_i, w_o, w_k, bias, has_bias, y, length, in_per_group, out_per_group, taps,
        stride, padding, dilation, groups, gap, rows, step, inverse, out_length,
    ):  # fmt: skip
        thread = cuda.grid(1)
        if thread >= y.size:
            return
        row, o = divmod(thread, out_length)
        n, co = divmod(row, out_per_group * groups)
        group, co_in_group = divmod(co, out_per_group)

        block, phase = divmod(o + padding, stride)
        first_tap = phase // gap * inverse % rows
        newest = block - first_tap * dilation // stride  # the input that the first tap of the phase reads
        begin = max(0, -((length - 1 - newest) // step))
        end = min((taps - first_tap + rows - 1) // rows, newest // step + 1)
        if phase % gap:
            end = 0

        # The longer loop is inside; its addresses advance by a constant.
        x_group = n * x_n + group * in_per_group * x_c
        w_group = group * in_per_group * w_i + co_in_group * w_o
        total = load(bias[co]) if has_bias else accumulator(0)
        for b in range(begin, end):
            x_at = x_group + (newest - b * step) * x_l
            w_at = w_group + (first_tap + b * rows) * w_k
            for c in range(0, in_per_group, SUM_CHANNELS):
                part = accumulator(0)
                for _ in range(min(SUM_CHANNELS, in_per_group - c)):
                    part += load(x[uint64(x_at)]) * load(w[uint64(w_at)])
                    x_at += x_c
                    w_at += w_i
                total += part
        y[uint64(thread)] = store(total)

    stored, integers = element.storage, (types.int64,)
    tensors = flat(stored), *integers * 3, flat(stored), *integers * 3, strided(stored, 1), *integers, flat(stored)
    return Kernel("k2_polyphase", k2_polyphase, (*tensors, *integers * 13), config.threads, key=repr(config))


class Polyphase(Rung):
    name = "k2_polyphase"
    idea = "one thread an output; the taps of its phase alone, no test and no remainder in the loop"

    def supports(self, problem, dtype, precision):
        return cuda_core_reason(dtype, precision)

    def config(self, problem, dtype, precision=None):
        return Config(dtype)

    def tile(self, config):
        return f"{config.threads} outputs, one a thread"

    def tiny_configs(self, problem, dtype):
        return [Config(dtype, threads=32)]

    def kernel(self, config):
        return make_kernel(config)

    def prepare(self, x, w, bias, y, problem, config=None, precision=None):
        if not are_adjacent(x.shape, x.strides):
            return lambda x, w, bias, y: self.run(x.contiguous(), w, bias, y, problem, config)
        config = config or self.config(problem, x.dtype)
        launch = _prepared(problem, config, x.strides, w.strides, bias and bias.strides)
        return launch if bias else taking_bias(launch, None)


@lru_cache(maxsize=1024)
def _prepared(
    problem: Problem, config: Config, x_stride: tuple, w_stride: tuple, bias_stride: tuple | None
) -> Prepared:
    p, t, dtype = problem, problem.taps, config.dtype
    outputs = p.batch * p.out_channels * p.out_length
    return make_kernel(config).prepare(
        -(-outputs // config.threads),
        *(alike((p.batch, p.in_channels, p.length), dtype, x_stride), *x_stride),
        *(alike((p.in_channels, p.out_channels_per_group, p.kernel_size), dtype, w_stride), *w_stride),
        *(alike((p.out_channels,), dtype, bias_stride), bias_stride is not None, alike((outputs,), dtype)),
        *(p.length, p.in_channels_per_group, p.out_channels_per_group, p.kernel_size),
        *(p.stride, p.padding, p.dilation, p.groups, t.gap, t.rows, t.step, t.dilation_inverse, p.out_length),
    )
