"""grad_input_depthwise: few channels a group.

A thread computes neighbouring positions from a run of grad_output, in 16-byte vectors."""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.formula.taps import Taps
from numba_tconv.gradients.rung import GradientRung
from numba_tconv.kernels.common.arguments import (
    Placed,
    PlacedSignal,
    Weights,
    arguments,
    of_problem,
    over_planes,
    placed_like,
    placed_signal_like,
    weights_like,
)
from numba_tconv.kernels.depthwise.rows import (
    MOST_ROWS,
    Meeting,
    blocks_of,
    depthwise_refusal,
    fitting,
    make_multiply_from_memory,
    many_channels,
    split,
)
from numba_tconv.ptx import load_guarded, load_run, multiply_add, store_run, vectors_of
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, flat
from numba_tconv.runtime.layout import Layout


@dataclass(frozen=True)
class Config(Meeting):
    """A row has ``lanes`` threads; each makes ``positions`` a pass."""

    dtype: torch.dtype
    taps: Taps
    in_per_group: int
    out_per_group: int
    positions: int
    lanes: int = 128
    threads: int = 128
    passes: int = 8
    min_blocks: int = 8
    from_memory: bool = False  # code for each alignment

    @property
    def products(self) -> tuple:
        return self.meetings


class Sizes(NamedTuple):
    length: int
    out_length: int
    padding: int
    rows: int
    in_channels: int
    passes: int


@cache
def make_kernel(config: Config) -> Kernel:
    element, stride, kernel_size = ELEMENTS[config.dtype], config.taps.stride, config.taps.kernel_size
    store, accumulator = element.store, element.accumulator
    vector, window, positions = config.vector, config.window, config.positions
    lanes, teams = config.lanes, config.threads // config.lanes
    in_per_group, out_per_group = config.in_per_group, config.out_per_group
    single, whole = out_per_group == 1, positions == vector
    span, hop = vectors_of(element, window) * vector, lanes * positions
    fetch, fetch_guarded = load_run(element, window), load_guarded(element, window)
    fetch_weights, put = load_guarded(element, kernel_size), store_run(element)
    multiply = multiply_add((config.products,))
    from_memory, multiply_from_memory = config.from_memory, make_multiply_from_memory(config, positions)

    def grad_input_depthwise(grad_output, weight, grad_input, sizes):
        values = cuda.local.array(window, dtype=accumulator)
        weights = cuda.local.array(kernel_size, dtype=accumulator)
        part = cuda.local.array(positions, dtype=accumulator)
        total = cuda.local.array(positions, dtype=accumulator)
        g, stride_c, stride_l = grad_output.data, grad_output.stride_c, grad_output.stride_l

        thread = uint32(cuda.threadIdx.x)
        team, lane = int32(thread // uint32(lanes)), int32(thread % uint32(lanes))
        row = int64(cuda.blockIdx.x) * teams + team
        if row >= sizes.rows:
            return
        n = int64(uint32(row) // uint32(sizes.in_channels))
        channel = row - n * sizes.in_channels
        source = n * grad_output.stride_n + channel // in_per_group * out_per_group * stride_c
        w = channel * weight.stride_i
        if single:
            fetch_weights(weights, weight.data, w, weight.stride_k, int32(0), int32(kernel_size))
        target = row * sizes.length
        length, out_length = int32(sizes.length), int32(sizes.out_length)
        stretch = int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y
        if stretch * sizes.passes * hop >= length + vector:
            return
        stretch_begin = int32(stretch * sizes.passes * hop)
        end = int32(stretch_begin + sizes.passes * hop)
        i = int32(stretch_begin + lane * positions)
        if whole:
            shift = int32((grad_input.offset + target) & (vector - 1))
            i = int32(i - shift)
            end = int32(end - shift)
        while i < end and i < length:
            begin = int32(i * stride - sizes.padding)
            for z in range(positions):
                total[z] = accumulator(0)
            for j in range(out_per_group):
                run = source + j * stride_c + begin
                skip = int32((grad_output.offset + run) & (vector - 1))
                run -= skip
                for z in range(positions):
                    part[z] = accumulator(0)
                if not single:
                    fetch_weights(weights, weight.data, w + j * weight.stride_o, weight.stride_k, int32(0),
                                  int32(kernel_size))  # fmt: skip
                inside = (
                    stride_l == 1 and begin >= 0 and begin + window <= out_length and run >= 0 and run + span <= g.size
                )
                if from_memory:
                    if inside:
                        multiply_from_memory(part, weights, g, run, int32(0), skip)
                elif inside:
                    fetch(values, g, run, skip)
                if not inside:
                    fetch_guarded(values, g, source + j * stride_c, stride_l, begin, out_length)
                if not from_memory or not inside:
                    multiply(part, weights, values, 0)
                for z in range(positions):
                    total[z] += part[z]
            if whole and i >= 0 and i + positions <= length:
                put(grad_input.data, target + i, total, 0)
            else:
                for z in range(positions):
                    if i + z >= 0 and i + z < length:
                        grad_input.data[uint64(target + i + z)] = store(total[z])
            i = int32(i + hop)

    tensors = (arguments(fields, data=flat(element.storage)) for fields in (PlacedSignal, Weights, Placed))
    signature = *tensors, arguments(Sizes)
    name, threads = "grad_input_depthwise", config.threads
    return Kernel(name, grad_input_depthwise, signature, threads, min_blocks=config.min_blocks, key=repr(config))


def make(problem: Problem, dtype: torch.dtype, **tile) -> Config:
    sizes = dtype, problem.taps, problem.in_channels_per_group, problem.out_channels_per_group
    return fitting(dtype, lambda positions: Config(*sizes, positions, **tile))


@lru_cache(maxsize=1024)
def choose(problem: Problem, dtype: torch.dtype) -> Config:
    config = make(problem, dtype)
    blocks = blocks_of(dtype, config.window + problem.kernel_size + 2 * config.positions)
    lanes = next((n for n in (128, 64, 32) if n * config.positions <= problem.length), 32)
    passes = 16 if config.positions == 1 else 8
    return make(problem, dtype, lanes=lanes, passes=passes, min_blocks=blocks)


class InputDepthwise(GradientRung):
    name = "grad_input_depthwise"
    of = "grad_input"
    idea = "few channels a group: grad_output in vectors straight into registers, shifted there; weights in registers"
    memory_bound = True
    make_kernel = staticmethod(make_kernel)

    def supports(self, problem, dtype, precision):
        if why := super().supports(problem, dtype, precision) or depthwise_refusal(problem):
            return why
        if problem.batch * problem.in_channels > MOST_ROWS:
            return f"it takes up to {MOST_ROWS} pairs of a sample and a channel"
        return None

    def unsuited(self, problem, dtype, precision, device):
        return many_channels(problem)

    def config(self, problem, dtype, device=None, precision=None):
        return choose(problem, dtype)

    def tiny_configs(self, problem, dtype):
        return [make(problem, dtype, lanes=lanes, threads=4, passes=2, min_blocks=1) for lanes in (4, 2)]

    def prepare(self, grad_output, weight, result, problem, config=None, precision=None):
        return _prepared(problem, config or choose(problem, result.dtype), grad_output, weight, result)


@lru_cache(maxsize=1024)
def _prepared(problem: Problem, config: Config, g: Layout, w: Layout, result: Layout) -> Prepared:
    p, rows = problem, problem.batch * problem.in_channels
    # The first vector may begin early.
    passes, stretches = split(rows, -(-(p.length + config.vector - 1) // config.positions), config)
    return make_kernel(config).prepare(
        over_planes(-(-rows // (config.threads // config.lanes)), stretches),
        *(placed_signal_like(g), weights_like(w), placed_like(result)),
        of_problem(Sizes, p, rows=rows, passes=passes),
    )
