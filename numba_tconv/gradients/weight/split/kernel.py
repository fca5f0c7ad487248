"""grad_weight_split: a register-tiled matrix product on CUDA cores, its long sums split over blocks.

    x, grad_output --cp.async--> stages in shared memory --vectors--> registers --> a split's sums --gradients/sum.py-->

With few rows and columns, slices of threads share positions. Partial sums and short splits limit float32's rounding
error."""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

from numba import cuda, int32, int64, types

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.sum import SummedRung, accumulator_of, added_up
from numba_tconv.kernels.common.arguments import Signal, arguments, of_problem, signal_like
from numba_tconv.kernels.common.register_tile import make_put_aside
from numba_tconv.kernels.k4_register_tile.plan import vectors_align
from numba_tconv.ptx import cp_async_commit, cp_async_wait, device_function
from numba_tconv.runtime import device as gpu
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat
from numba_tconv.runtime.layout import NO_GPU, Layout

from .choose import choose, splits_of
from .epilogue import make_store
from .mainloop import Registers, make_multiply
from .producer import Position, make_load
from .tile import REST, WHOLE, Config, tiny


class Sizes(NamedTuple):
    batch: int
    length: int
    out_length: int
    in_channels_per_group: int
    out_channels_per_group: int
    kernel_size: int
    groups: int
    padding: int


class Grid(NamedTuple):
    columns: int
    row_tiles: int
    channel_tiles: int
    phase_chunks: int
    tap_chunks: int
    phases: int  # with taps of this kind
    stages: int
    split_stages: int


class Tile(NamedTuple):
    thread: int
    lane_m: int
    lane_p: int
    split: int
    group: int
    first_row: int
    first_channel: int
    first_phase: int
    first_tap: int
    end_tap: int
    rows_left: int
    channels_left: int
    x_source: int  # the first row at column 0
    g_source: int  # the first channel at column 0


def make_blocks(config: Config) -> Callable:
    vector, slice_threads = config.vector, config.slice_threads
    block_m, block_l, tap_chunk = config.block_m, config.block_l, config.tap_chunk
    phases, channels, rows = config.phases, config.channels, config.taps.rows
    x_pitch, g_pitch = config.pitch(config.block_l), config.pitch(config.width)
    x_stage, stage, partial, partials = config.x_stage, config.stage, config.partial, 2 * config.stage
    all_sums, all_xs, all_gs = config.sums, config.thread_m * config.vector, config.window_columns
    vectors_a_turn, hop = config.vectors_a_turn, config.slices * config.vector
    of_whole, of_rest = config.part == WHOLE, config.part == REST
    # As many lanes along m as along p make the fewest loads.
    lanes_m, warp_p = config.lanes_m, min(config.lanes_p, 8)
    accumulator = ELEMENTS[config.dtype].accumulator
    wait_for_stage = cp_async_wait(0)
    load, multiply, store = make_load(config), make_multiply(config), make_store(config)
    put_aside, add_partial_sums = make_put_aside(config, all_sums)

    @device_function
    def lanes_of(e):
        return int32(e // warp_p % lanes_m), int32(e // (warp_p * lanes_m) * warp_p + e % warp_p)

    def grad_weight_split(grad_output, x, result, sizes, grid):
        whole = sizes.kernel_size // rows * rows
        begin, end = whole if of_rest else 0, whole if of_whole else sizes.kernel_size
        shared = cuda.shared.array(0, dtype=accumulator)
        # Neighbours read the same positions.
        block = cuda.gridDim.x - 1 - cuda.blockIdx.x if of_rest else cuda.blockIdx.x
        quotient, row_tile = divmod(int64(block), grid.row_tiles)
        quotient, channel_tile = divmod(quotient, grid.channel_tiles)
        quotient, phase_chunk = divmod(quotient, grid.phase_chunks)
        quotient, chunk = divmod(quotient, grid.tap_chunks)
        split, group = divmod(quotient, sizes.groups)
        first_row, first_channel, first_phase = row_tile * block_m, channel_tile * channels, phase_chunk * phases
        first_tap = begin + first_phase + chunk * tap_chunk * rows
        rows_left = int32(min(block_m, sizes.in_channels_per_group - first_row))
        channels_left = sizes.out_channels_per_group - first_channel
        x_source = (group * sizes.in_channels_per_group + first_row) * x.stride_c
        g_source = (group * sizes.out_channels_per_group + first_channel) * grad_output.stride_c

        thread = int32(cuda.threadIdx.x)
        lane_m, lane_p = lanes_of(thread % slice_threads)
        tile = Tile(thread, lane_m, lane_p, split, group, first_row, first_channel, first_phase, first_tap, end,
                    rows_left, channels_left, x_source, g_source)  # fmt: skip
        slice_position = int32(thread // slice_threads * vector)
        sums = cuda.local.array(all_sums, dtype=accumulator)
        xs = cuda.local.array(all_xs, dtype=accumulator)
        gs = cuda.local.array(all_gs, dtype=accumulator)
        registers = Registers(sums, xs, gs, shared)
        for z in range(all_sums):
            sums[z] = accumulator(0)

        # Loads run a stage ahead, at column i.
        total = int32(min(grid.split_stages, grid.stages - split * grid.split_stages))
        n, i = divmod(split * grid.split_stages * block_l, grid.columns)
        hop_n, hop_i = divmod(int64(block_l), grid.columns)
        load_slot, multiply_slot = int32(0), int32(0)
        until_aside = int32(partial)
        s = int32(-1)
        while s < total:
            if s >= 0:
                wait_for_stage()
            cuda.syncthreads()  # the stage has landed; a slot is free
            if s + 1 < total:
                load(shared, load_slot, Position(n, i), tile, grad_output, x, sizes, grid)
                load_slot = int32(stage - load_slot)
                n += hop_n
                i += hop_i
                if i >= grid.columns:
                    n += 1
                    i -= grid.columns
            cp_async_commit()
            if s >= 0:
                x_row = int32(multiply_slot + lane_m * x_pitch)
                g_row = int32(multiply_slot + x_stage + lane_p * g_pitch)
                multiply_slot = int32(stage - multiply_slot)
                position = slice_position
                while position < block_l:
                    multiply(registers, x_row + position, g_row + position)
                    if vectors_a_turn == 2:
                        multiply(registers, x_row + position + hop, g_row + position + hop)
                    position = int32(position + vectors_a_turn * hop)
                until_aside = int32(until_aside - 1)
                if partial and until_aside == 0:
                    until_aside = int32(partial)
                    put_aside(sums, shared, partials + thread * vector, s >= partial)
            s = int32(s + 1)
        if partial and total >= partial:
            add_partial_sums(sums, shared, partials + thread * vector)
        store(sums, shared, tile, result, sizes, grid)

    return grad_weight_split


@cache
def make_kernel(config: Config) -> Kernel:
    element = ELEMENTS[config.dtype]
    signal = arguments(Signal, data=flat(element.storage))
    signature = (signal, signal, flat(element.accumulator), arguments(Sizes), arguments(Grid))
    function = make_blocks(config)
    if config.rest_tile:
        compute_whole, compute_rest = device_function(function), device_function(make_blocks(config.rest_tile))
        signature += (arguments(Grid), types.int64)

        def function(grad_output, x, result, sizes, grid, grid_of_rest, whole_blocks):
            if cuda.blockIdx.x < whole_blocks:
                compute_whole(grad_output, x, result, sizes, grid)
            else:
                compute_rest(grad_output, x, result, sizes, grid_of_rest)

    sizes = dict(threads=config.threads, shared_bytes=config.shared_bytes, min_blocks=config.min_blocks)
    return Kernel("grad_weight_split", function, signature, **sizes, key=repr(config))


def _copying(config: Config, x: Layout) -> Config:
    copies = x.dtype.itemsize >= 4 and vectors_align(x, 16 // x.dtype.itemsize)
    return config.copying_vectors() if copies else config


class WeightSplit(SummedRung):
    name = "grad_weight_split"
    of = "grad_weight"
    idea = "a matrix product from registers; the positions are split over blocks, and added up in a fixed order"
    minimum_cc = (8, 0)  # cp.async
    make_kernel, tiny_configs = staticmethod(make_kernel), staticmethod(tiny)

    def config(self, problem, dtype, device=None, precision=None):
        return choose(problem, dtype, device or gpu.H200)

    def config_on(self, device, problem, dtype, precision):
        x = Layout.contiguous(problem.in_shape, dtype, NO_GPU)
        return _copying(super().config_on(device, problem, dtype, precision), x)

    def prepare(self, grad_output, x, result, problem, config=None, precision=None):
        splits, launch = _prepared(problem, config, grad_output, x, gpu.of(result.index))
        return added_up(launch, result, splits)


@lru_cache(maxsize=1024)
def _prepared(
    problem: Problem, config: Config | None, g: Layout, x: Layout, device: gpu.Device
) -> tuple[int, Prepared]:
    p = problem
    config = config or _copying(choose(p, x.dtype, device), x)
    splits, _ = splits_of(p, config, device)

    def grid_of(tile):
        stages, split_stages = tile.stages(p), -(-tile.stages(p) // splits)
        return Grid(tile.columns(p), *tile.division(p), tile.phases_of(p), stages, split_stages)

    rest = config.rest_tile
    of_rest = (grid_of(rest), splits * config.own_blocks(p)) if rest else ()
    weights = p.in_channels * p.out_channels_per_group * p.kernel_size
    launch = make_kernel(config).prepare(
        splits * config.blocks(p),
        *(signal_like(g), signal_like(x), alike((splits * weights,), accumulator_of(x.dtype))),
        *(of_problem(Sizes, p), grid_of(config), *of_rest),
    )
    return splits, launch
