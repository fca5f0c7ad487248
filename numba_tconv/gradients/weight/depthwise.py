"""grad_weight_depthwise: few channels a group.

A pair of channels has one sum a tap; blocks split its positions. A thread's sums have at most PARTIAL_TERMS products.
Blocks add them up in float64; gradients/sum.py adds the blocks' sums."""

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import torch
from numba import cuda, float64, int32, int64, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.formula.taps import Taps
from numba_tconv.gradients.sum import SummedRung, accumulator_of, added_up
from numba_tconv.kernels.common.arguments import PlacedSignal, arguments, of_problem, placed_signal_like
from numba_tconv.kernels.depthwise.rows import (
    Meeting,
    blocks_of,
    depthwise_refusal,
    fitting,
    make_multiply_from_memory,
    many_channels,
)
from numba_tconv.ptx import load_guarded, load_run, multiply_add, vectors_of
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat
from numba_tconv.runtime.layout import Layout

PARTIAL_TERMS = 128  # of a thread's sum, for its rounding error
SUMMANDS = 8  # of a tap, after a block's first step
MOST_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class Config(Meeting):
    """A thread takes ``positions`` a pass, ``passes`` times."""

    dtype: torch.dtype
    taps: Taps
    positions: int
    threads: int = 128  # a multiple of SUMMANDS
    passes: int = 16
    min_blocks: int = 8
    from_memory: bool = False  # code for each alignment

    @cached_property
    def products(self) -> tuple:
        """(tap, position, place in the window) of every product."""
        return tuple((tap, position, place) for position, tap, place in self.meetings)


class Sizes(NamedTuple):
    batch: int
    length: int
    out_length: int
    padding: int
    pairs: int
    in_channels_per_group: int
    out_channels_per_group: int
    vectors: int
    split_vectors: int


@cache
def make_kernel(config: Config) -> Kernel:
    element, stride, kernel_size = ELEMENTS[config.dtype], config.taps.stride, config.taps.kernel_size
    accumulator = element.accumulator
    vector, window, positions, threads = config.vector, config.window, config.positions, config.threads
    pitch = threads + SUMMANDS  # against bank conflicts
    x_span, g_span = vectors_of(element, positions) * vector, vectors_of(element, window) * vector
    fetch_x, fetch_x_guarded = load_run(element, positions), load_guarded(element, positions)
    fetch_g, fetch_g_guarded = load_run(element, window), load_guarded(element, window)
    multiply = multiply_add((config.products,))
    from_memory, multiply_from_memory = config.from_memory, make_multiply_from_memory(config, kernel_size)
    shared_sums, shared_parts = kernel_size * pitch, kernel_size * SUMMANDS

    def grad_weight_depthwise(grad_output, x, partials, sizes):
        shared = cuda.shared.array(shared_sums, dtype=accumulator)
        parts = cuda.shared.array(shared_parts, dtype=float64)
        xs = cuda.local.array(positions, dtype=accumulator)
        gs = cuda.local.array(window, dtype=accumulator)
        sums = cuda.local.array(kernel_size, dtype=accumulator)
        for k in range(kernel_size):
            sums[k] = accumulator(0)

        thread = int32(cuda.threadIdx.x)
        split, pair = divmod(int64(cuda.blockIdx.x), sizes.pairs)
        out_per_group = sizes.out_channels_per_group
        channel = pair // out_per_group
        out_channel = channel // sizes.in_channels_per_group * out_per_group + pair - channel * out_per_group
        x_row, g_row = channel * x.stride_c, out_channel * grad_output.stride_c
        v = split * sizes.split_vectors + thread
        end = min((split + 1) * sizes.split_vectors, sizes.batch * sizes.vectors)
        length, out_length, vectors = int32(sizes.length), int32(sizes.out_length), int32(sizes.vectors)
        passes_left = int32((end - v + threads - 1) // threads)
        n = v // vectors
        q = int32(v - n * vectors)
        x_row += n * x.stride_n
        g_row += n * grad_output.stride_n
        hop_n = int64(threads // vectors)
        hop_q = int32(threads - hop_n * vectors)
        while passes_left > 0:
            i = int32(q * positions)
            run = x_row + i
            skip = int32((x.offset + run) & (vector - 1))
            run -= skip
            if x.stride_l == 1 and i + positions <= length and run >= 0 and run + x_span <= x.data.size:
                fetch_x(xs, x.data, run, skip)
            else:
                fetch_x_guarded(xs, x.data, x_row, x.stride_l, i, length)
            begin = int32(i * stride - sizes.padding)
            run = g_row + begin
            skip = int32((grad_output.offset + run) & (vector - 1))
            run -= skip
            inside = grad_output.stride_l == 1 and begin >= 0 and begin + window <= out_length
            inside = inside and run >= 0 and run + g_span <= grad_output.data.size
            if from_memory:
                if inside:
                    multiply_from_memory(sums, xs, grad_output.data, run, int32(0), skip)
            elif inside:
                fetch_g(gs, grad_output.data, run, skip)
            if not inside:
                fetch_g_guarded(gs, grad_output.data, g_row, grad_output.stride_l, begin, out_length)
            if not from_memory or not inside:
                multiply(sums, xs, gs, 0)
            passes_left = int32(passes_left - 1)
            x_row += hop_n * x.stride_n
            g_row += hop_n * grad_output.stride_n
            q = int32(q + hop_q)
            if q >= vectors:
                x_row += x.stride_n
                g_row += grad_output.stride_n
                q = int32(q - vectors)

        for k in range(kernel_size):
            shared[k * pitch + thread] = sums[k]
        cuda.syncthreads()
        e = thread
        while e < kernel_size * SUMMANDS:
            value = float64(0)
            first_sum = int32(e // SUMMANDS * pitch + e % SUMMANDS)
            for z in range(threads // SUMMANDS):
                value += float64(shared[uint64(first_sum + z * SUMMANDS)])
            parts[uint64(e)] = value
            e = int32(e + threads)
        cuda.syncthreads()
        e = thread
        while e < kernel_size:
            value = float64(0)
            for z in range(SUMMANDS):
                value += parts[uint64(e * SUMMANDS + z)]
            partials[uint64((split * sizes.pairs + pair) * kernel_size + e)] = accumulator(value)
            e = int32(e + threads)

    signal = arguments(PlacedSignal, data=flat(element.storage))
    signature = (signal, signal, flat(accumulator), arguments(Sizes))
    name = "grad_weight_depthwise"
    return Kernel(name, grad_weight_depthwise, signature, threads, min_blocks=config.min_blocks, key=repr(config))


def make(problem: Problem, dtype: torch.dtype, **tile) -> Config:
    return fitting(dtype, lambda positions: Config(dtype, problem.taps, positions, **tile))


@lru_cache(maxsize=1024)
def choose(problem: Problem, dtype: torch.dtype) -> Config:
    config = make(problem, dtype)
    blocks = blocks_of(dtype, config.window + problem.kernel_size + config.positions)
    threads = 256 if blocks == 8 else 128
    blocks = blocks * 128 // threads
    return make(problem, dtype, threads=threads, passes=PARTIAL_TERMS // config.positions, min_blocks=blocks)


def splits_of(problem: Problem, config: Config) -> tuple[int, int, int]:
    vectors = -(-problem.length // config.positions)
    most = config.threads * config.passes
    splits = -(-problem.batch * vectors // most)
    return vectors, splits, -(-problem.batch * vectors // splits)


class WeightDepthwise(SummedRung):
    name = "grad_weight_depthwise"
    of = "grad_weight"
    idea = "few channels a group: both operands in vectors straight into registers; a sum a tap, split over blocks"
    memory_bound = True
    make_kernel = staticmethod(make_kernel)

    def supports(self, problem, dtype, precision):
        if why := super().supports(problem, dtype, precision) or depthwise_refusal(problem):
            return why
        splits = splits_of(problem, choose(problem, dtype))[1]
        if splits * problem.in_channels * problem.out_channels_per_group > MOST_BLOCKS:
            return f"it takes up to {MOST_BLOCKS} blocks"
        return None

    def unsuited(self, problem, dtype, precision, device):
        return many_channels(problem)

    def config(self, problem, dtype, device=None, precision=None):
        return choose(problem, dtype)

    def tiny_configs(self, problem, dtype):
        return [make(problem, dtype, threads=8, passes=passes, min_blocks=1) for passes in (1, 3)]

    def prepare(self, grad_output, x, result, problem, config=None, precision=None):
        splits, launch = _prepared(problem, config or choose(problem, result.dtype), grad_output, x)
        return added_up(launch, result, splits)


@lru_cache(maxsize=1024)
def _prepared(problem: Problem, config: Config, g: Layout, x: Layout) -> tuple[int, Prepared]:
    p, (vectors, splits, split_vectors) = problem, splits_of(problem, config)
    pairs = p.in_channels * p.out_channels_per_group
    launch = make_kernel(config).prepare(
        splits * pairs,
        *(placed_signal_like(g), placed_signal_like(x)),
        alike((splits * pairs * p.kernel_size,), accumulator_of(x.dtype)),
        of_problem(Sizes, p, pairs=pairs, vectors=vectors, split_vectors=split_vectors),
    )
    return splits, launch
