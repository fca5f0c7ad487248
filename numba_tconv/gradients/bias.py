"""grad_bias: grad_output summed over samples and positions.

Blocks split a channel's positions; sum.py adds up their sums. Totals over batches are float64, so the error does not
grow with the length."""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from numba import cuda, float64, int32, int64, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.arguments import Signal, arguments, of_problem, signal_like
from numba_tconv.runtime import device as gpu
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat
from numba_tconv.runtime.layout import Layout

from .sum import SummedRung, accumulator_of, added_up

BLOCKS = 8  # of a multiprocessor


@dataclass(frozen=True)
class Config:
    dtype: torch.dtype
    threads: int = 256  # a power of two
    batch: int = 4  # loads in flight


class Sizes(NamedTuple):
    batch: int
    out_length: int
    out_channels: int
    split_length: int


@cache
def make_kernel(config: Config) -> Kernel:
    threads, batch = config.threads, config.batch
    kind = ELEMENTS[config.dtype]
    load, accumulator = kind.load, kind.accumulator
    halvings = threads.bit_length() - 1

    def grad_bias(grad_output, partials, sizes):
        shared = cuda.shared.array(threads, dtype=float64)
        values = cuda.local.array(batch, dtype=accumulator)
        thread = int32(cuda.threadIdx.x)
        split, channel = divmod(int64(cuda.blockIdx.x), sizes.out_channels)
        position = split * sizes.split_length + thread
        end = min((split + 1) * sizes.split_length, sizes.batch * sizes.out_length)

        n, o = divmod(position, sizes.out_length)
        hop_n, hop_o = divmod(int64(threads), sizes.out_length)
        total = float64(0)
        while position < end:
            for z in range(batch):
                element = n * grad_output.stride_n + channel * grad_output.stride_c + o * grad_output.stride_l
                values[z] = load(grad_output.data[uint64(element)]) if position < end else accumulator(0)
                position += threads
                n += hop_n
                o += hop_o
                if o >= sizes.out_length:
                    n += 1
                    o -= sizes.out_length
            part = accumulator(0)
            for z in range(batch):
                part += values[z]
            total += float64(part)

        shared[thread] = total
        for h in range(halvings):
            cuda.syncthreads()
            half = threads >> (h + 1)
            if thread < half:
                shared[thread] += shared[thread + half]
        if thread == 0:
            partials[uint64(split * sizes.out_channels + channel)] = accumulator(shared[0])

    signature = (arguments(Signal, data=flat(kind.storage)), flat(accumulator), arguments(Sizes))
    return Kernel("grad_bias", grad_bias, signature, threads, key=repr(config))


def splits_of(problem, config: Config, device: gpu.Device) -> tuple[int, int]:
    positions, pass_length = problem.batch * problem.out_length, config.threads * config.batch
    wanted = -(-2 * BLOCKS * device.multiprocessors // problem.out_channels)
    length = -(-positions // wanted // pass_length) * pass_length or pass_length
    return -(-positions // length), length


class Bias(SummedRung):
    name = "grad_bias"
    of = "grad_bias"
    idea = "every element read once; the positions of a channel are split over blocks, and added up in a fixed order"
    make_kernel = staticmethod(make_kernel)

    def config(self, problem, dtype, device=None, precision=None):
        return Config(dtype)

    def tiny_configs(self, problem, dtype):
        return [Config(dtype, threads=4, batch=1), Config(dtype, threads=2, batch=2)]

    def prepare(self, grad_output, result, problem, config=None, precision=None):
        splits, launch = _prepared(problem, config or Config(result.dtype), grad_output, gpu.of(result.index))
        return added_up(launch, result, splits)


@lru_cache(maxsize=1024)
def _prepared(problem: Problem, config: Config, g: Layout, device: gpu.Device) -> tuple[int, Prepared]:
    splits, length = splits_of(problem, config, device)
    sums, sizes = splits * problem.out_channels, of_problem(Sizes, problem, split_length=length)
    return splits, make_kernel(config).prepare(sums, signal_like(g), alike((sums,), accumulator_of(g.dtype)), sizes)
