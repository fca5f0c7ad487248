"""grad_input_tile: a register-tiled matrix product on CUDA cores.

    grad_output, packed weights --cp.async--> stages in shared memory --vectors--> registers --staging--> grad_input

A row's taps read one window of grad_output (gradients/window.py). Partial sums limit float32's rounding error."""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from numba import cuda, int32, int64

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.input.split_k import second_stage, split
from numba_tconv.gradients.rung import GradientRung
from numba_tconv.kernels.common import split_sums
from numba_tconv.kernels.common.arguments import Signal, arguments, of_problem, over_planes, signal_like
from numba_tconv.kernels.common.register_tile import make_put_aside
from numba_tconv.kernels.rung import Step
from numba_tconv.ptx import cp_async, cp_async_commit, cp_async_wait, device_function, griddepcontrol_wait, shared_base
from numba_tconv.runtime import device as gpu
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat
from numba_tconv.runtime.layout import Layout, room

from .choose import choose
from .epilogue import make_store
from .mainloop import Multiply, Pair, Registers, make_multiply
from .pack import make_kernel as make_pack
from .pack import prepare_pack
from .producer import make_load
from .tile import Config, tiny


class Sizes(NamedTuple):
    batch: int
    length: int
    out_length: int
    in_channels_per_group: int
    out_channels_per_group: int
    groups: int
    padding: int


class Grid(NamedTuple):
    columns: int  # between samples, for tiles
    window_columns: int  # between samples, for windows
    row_tiles: int
    tap_chunks: int
    channel_chunks: int
    phase_chunks: int
    phases: int
    taps_per_row: int
    full_phases: int  # with taps_per_row taps; the others have one less


class Block(NamedTuple):
    thread: int
    group: int
    row_tile: int
    sample: int  # of the first column
    position: int
    row: int
    column: int


def _make_multiply_next(config: Config, multiply: Multiply):
    """Build ``multiply_channel``, all phases of a channel, some long, and ``multiply_pairs``, a turn of pairs alike.

    ``g`` and ``w``: addresses of their operands. They return the next ones."""
    pairs_a_turn, short_a_turn = config.pairs_a_turn, config.short_a_turn
    long_phases, short_phases = config.long_phases, config.phases - config.long_phases
    pitch, w_pitch = config.itemsize * config.pitch, config.itemsize * config.tap_chunk * config.block_m
    w_short_pitch = config.itemsize * (config.tap_chunk - 1) * config.block_m
    multiply_long, multiply_turn, multiply_short_turn = multiply.long, multiply.turn, multiply.short_turn

    @device_function
    def multiply_channel(registers, g, w, full_phases, taps):
        # Long phases come last, to keep the loop fast.
        g_long, w_long = g, w
        g, w = int32(g + long_phases * pitch), int32(w + long_phases * w_pitch)
        p = int32(0)
        while p < short_phases:
            pair = Pair(g, w, w_short_pitch, 0, full_phases, taps)
            multiply_short_turn(int32(0), (registers, pair))
            g, w = int32(g + short_a_turn * pitch), int32(w + short_a_turn * w_short_pitch)
            p = int32(p + short_a_turn)
        for _ in range(long_phases):
            pair = Pair(g_long, w_long, w_pitch, 0, full_phases, taps)
            multiply_long(int32(0), (registers, pair))
            g_long, w_long = int32(g_long + pitch), int32(w_long + w_pitch)
        return g, w

    @device_function
    def multiply_pairs(registers, g, w, number, full_phases, taps):
        pair = Pair(g, w, w_pitch, number, full_phases, taps)
        multiply_turn(int32(0), (registers, pair))
        return int32(g + pairs_a_turn * pitch), int32(w + pairs_a_turn * w_pitch)

    return multiply_channel, multiply_pairs


def _make_copy_weights(config: Config):
    """Build ``copy_weights``: a block copies a stage's weights from ``first`` to element ``to`` of shared memory."""
    threads, vector, w_stage = config.threads, config.vector, config.w_stage
    copies, copy = -(-w_stage // (vector * threads)), cp_async(vector)

    @device_function
    def copy_weights(shared, to, weights, first, thread):
        for j in range(copies):
            e = int32((thread + j * threads) * vector)
            if (j + 1) * threads * vector <= w_stage or e < w_stage:
                copy(shared, to + e, weights, first + e, True)

    return copy_weights


@cache
def make_kernel(config: Config) -> Kernel:
    threads, vector, vector_m, stages = config.threads, config.vector, config.vector_m, config.stages
    block_n, thread_m, thread_n = config.block_n, config.thread_m, config.thread_n
    lanes_m, lanes_n, warps_n = config.lanes_m, 32 // config.lanes_m, config.warps_n
    phases, channels, pairs = config.phases, config.channels, config.pairs
    long_phases, pairs_a_turn = config.long_phases, config.pairs_a_turn
    itemsize, g_stage, w_stage, stage = config.itemsize, config.g_stage, config.w_stage, config.stage
    partial, partials, entries = config.partial, config.partials, config.entries
    all_sums, all_columns, early_launch = thread_m * thread_n, thread_n + config.halo, config.early_launch
    element = ELEMENTS[config.dtype]
    accumulator = element.accumulator
    copy_weights, wait_for_stage = _make_copy_weights(config), cp_async_wait(stages - 2)
    fill_table, fetch = make_load(config)
    multiply = make_multiply(config)
    taps_of_stage, (multiply_channel, multiply_pairs) = multiply.taps_of_stage, _make_multiply_next(config, multiply)
    put_aside, add_partial_sums = make_put_aside(config, all_sums)
    store = make_store(config)

    def grad_input_tile(grad_output, weights, grad_input, sizes, grid):
        shared = cuda.shared.array(0, dtype=accumulator)
        table = cuda.shared.array(entries, dtype=int64)
        # Neighbouring blocks read the same windows.
        group, row_tile = divmod(int32(cuda.blockIdx.x), int32(grid.row_tiles))
        thread = int32(cuda.threadIdx.x)
        first_column = (int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y) * block_n
        sample, position = divmod(first_column, grid.columns)
        warp, lane = thread // 32, thread % 32
        row = int32(warp // warps_n * (lanes_m * thread_m) + lane // lanes_n * vector_m)
        column = int32(warp % warps_n * (lanes_n * thread_n) + lane % lanes_n * thread_n)
        block = Block(thread, group, row_tile, sample, position, row, column)
        base = shared_base(shared)
        first_columns, first_weights = int32(base + itemsize * column), int32(base + itemsize * (g_stage + row))
        sums = cuda.local.array(all_sums, dtype=accumulator)
        columns_of_pair = cuda.local.array(all_columns, dtype=accumulator)
        weights_of_tap = cuda.local.array(thread_m, dtype=accumulator)
        registers = Registers(sums, columns_of_pair, weights_of_tap, shared, base)
        for z in range(all_sums):
            sums[z] = accumulator(0)

        # Loads run stages - 1 ahead, at chunk, phase and channel.
        total = int32(grid.tap_chunks * grid.phase_chunks * grid.channel_chunks)
        chunk, phase, channel = int32(0), int32(0), int32(0)
        packed = int64(cuda.blockIdx.x) * total * w_stage
        source = group * sizes.out_channels_per_group * grad_output.stride_c
        load_slot, multiply_slot = int32(0), int32(0)
        until_aside = int32(partial)
        s = int32(1 - stages)
        while s < total:
            if s >= 0:
                wait_for_stage()
                cuda.syncthreads()  # the stage has landed; a slot is free
            if s + stages - 1 < total:
                if channel == 0:
                    fill_table(table, chunk, phase, block, grad_output, sizes, grid)
                channels_left = sizes.out_channels_per_group - channel
                fetch(shared, load_slot, grad_output.data, source, grad_output.stride_c, channels_left, table)
                if early_launch and channel == 0:
                    griddepcontrol_wait()
                copy_weights(shared, load_slot + g_stage, weights, packed, thread)
                load_slot = int32(load_slot + stage if load_slot < (stages - 1) * stage else 0)
                packed += w_stage
                source += channels * grad_output.stride_c
                channel = int32(channel + channels)
                if channel >= int32(sizes.out_channels_per_group):
                    source = group * sizes.out_channels_per_group * grad_output.stride_c
                    channel, phase = int32(0), int32(phase + phases)
                    if phase >= int32(grid.phases):
                        phase, chunk = int32(0), int32(chunk + 1)
            cp_async_commit()
            if s >= 0:
                full_phases, taps = taps_of_stage(s, grid)
                g = int32(first_columns + itemsize * multiply_slot)
                w = int32(first_weights + itemsize * multiply_slot)
                multiply_slot = int32(multiply_slot + stage if multiply_slot < (stages - 1) * stage else 0)
                if long_phases:
                    channels_of_stage = int32(channels)
                    while channels_of_stage > 0:
                        g, w = multiply_channel(registers, g, w, full_phases, taps)
                        channels_of_stage = int32(channels_of_stage - 1)
                else:
                    number = int32(0)
                    while number < pairs:
                        g, w = multiply_pairs(registers, g, w, number, full_phases, taps)
                        number = int32(number + pairs_a_turn)
                until_aside = int32(until_aside - 1)
                if partial and until_aside == 0:
                    until_aside = int32(partial)
                    put_aside(sums, shared, partials + thread * vector, s >= partial)
            s = int32(s + 1)

        if partial and total >= partial:
            add_partial_sums(sums, shared, partials + thread * vector)
        store(sums, shared, block, grad_input, sizes, grid)

    name, stored = "grad_input_tile", flat(element.storage)
    signature = arguments(Signal, data=stored), flat(accumulator), stored, arguments(Sizes), arguments(Grid)
    return Kernel(name, grad_input_tile, signature, threads, config.shared_bytes, config.min_blocks, key=repr(config))


class InputTile(GradientRung):
    name = "grad_input_tile"
    of = "grad_input"
    idea = "a matrix product from registers: one window of grad_output for all taps of a row, loaded a stage ahead"
    minimum_cc = (8, 0)  # cp.async
    tiny_configs = staticmethod(tiny)

    def config(self, problem, dtype, device=None, precision=None):
        return choose(problem, dtype, device or gpu.H200)

    def steps(self, config, problem, device=gpu.H200):
        pack = Step("pack", make_pack(config.alone, config.overlaps_packing))
        main = Step("main", make_kernel(config.alone), config.shared_bytes)
        return [pack, main, *split_sums.steps(config.splits, config.dtype, config.early_launch)]

    def prepare(self, grad_output, weight, result, problem, config=None, precision=None):
        plan = _prepared(problem, config, grad_output, weight, gpu.of(result.index))
        packed_room = room(plan.packed.shape, plan.packed.dtype, result.index)
        add_up = plan.add_up
        sums_room = room((add_up.sums,), torch.float32, result.index) if add_up else None

        def fill(grad_output, weight, result):
            packed = packed_room()
            plan.pack(weight, packed)
            if add_up:
                sums = sums_room()
                plan.main(grad_output, packed, sums)
                add_up.launch(sums, packed, result)
            else:
                plan.main(grad_output, packed, result)

        return fill


class Plan(NamedTuple):
    packed: torch.Tensor
    pack: Prepared
    main: Prepared
    add_up: split_sums.SecondStage | None


@lru_cache(maxsize=1024)
def _prepared(problem: Problem, config: Config | None, g: Layout, w: Layout, device: gpu.Device) -> Plan:
    config = config or choose(problem, g.dtype, device)
    packed, pack = prepare_pack(problem, config, w)
    p, t = split(problem, config.splits), problem.taps
    row_tiles, phases = config.row_tiles(p), min(t.rows, p.kernel_size)
    (columns, window_columns), chunks = config.columns(p), config.chunks_of(p)
    grid = Grid(
        columns=columns,
        window_columns=window_columns,
        row_tiles=row_tiles,
        **chunks._asdict(),
        phases=phases,
        taps_per_row=t.taps_per_row,
        full_phases=p.kernel_size - (t.taps_per_row - 1) * phases,
    )
    main = make_kernel(config.alone).prepare(
        over_planes(row_tiles * p.groups, config.column_tiles(p)),
        *(signal_like(g), packed, alike(p.in_shape, g.dtype), of_problem(Sizes, p), grid),
        early=config.early_launch,
    )
    return Plan(packed, pack, main, second_stage(problem, g.dtype, config.splits, config.early_launch))
