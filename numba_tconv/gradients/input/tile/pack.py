"""Pack weights in the blocks' order, in the accumulator's type.

Stages are (group, split, row tile, tap chunk, phase chunk, channel chunk); their weights (channel, phase, tap, m), then
zeros. In a stage of all taps, shorter phases have no place for a missing tap. Squares are transposed through shared
memory."""

import math
from functools import cache
from typing import NamedTuple

import torch
from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.input.split_k import split
from numba_tconv.kernels.common.arguments import arguments, of_problem
from numba_tconv.kernels.common.integer import divided
from numba_tconv.ptx import SIMULATOR, device_function, griddepcontrol_launch_dependents
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat, strided
from numba_tconv.runtime.layout import Layout

from .tile import Config

SIDE = 32
THREADS = 64 if SIMULATOR else 256
TORCH = {32: torch.float32, 64: torch.float64}


class Grid(NamedTuple):
    row_tiles: int
    tap_chunks: int
    channel_chunks: int
    phase_chunks: int
    phases: int
    in_channels_per_group: int
    splits: int


class Tap(NamedTuple):
    channel: int
    number: int
    phase: int


@cache
def make_kernel(config: Config, overlapped: bool) -> Kernel:
    """``overlapped``: main blocks may begin when all packing blocks have."""
    block_m, tap_chunk, w_stage, rows = config.block_m, config.tap_chunk, config.w_stage, config.taps.rows
    phases, long_phases = config.phases, config.long_phases
    channels, channel_taps = config.channels, config.channel_taps
    long_taps, all_rows, squares_m = long_phases * tap_chunk, channels * channel_taps, -(-block_m // SIDE)
    stage_taps, hop = channels * tap_chunk * phases, THREADS // SIDE
    pitch = SIDE + 1  # against bank conflicts
    numbers = SIDE * pitch
    element = ELEMENTS[config.dtype]
    load, accumulator = element.load, element.accumulator

    @device_function
    def tap_of(q):
        quotient = uint32(q) // uint32(phases)
        c = quotient // uint32(tap_chunk)
        return Tap(int32(c), int32(quotient - c * uint32(tap_chunk)), int32(q - quotient * phases))

    @device_function
    def row_of(q):
        """The tap's packed row, or -1."""
        tap = tap_of(q)
        if long_phases and tap.phase >= long_phases:
            row = int32(long_taps + (tap.phase - long_phases) * (tap_chunk - 1) + tap.number)
            return int32(tap.channel * channel_taps + row) if tap.number < tap_chunk - 1 else int32(-1)
        return int32(tap.channel * channel_taps + tap.phase * tap_chunk + tap.number)

    def grad_input_pack(weight, packed, grid):
        if overlapped:
            griddepcontrol_launch_dependents()
        square = cuda.shared.array(numbers, dtype=accumulator)
        number, square_m = divided(int32(cuda.blockIdx.x), int32(squares_m))
        quotient, channel_chunk = divided(number, int32(grid.channel_chunks))
        quotient, phase_chunk = divided(quotient, int32(grid.phase_chunks))
        quotient, chunk = divided(quotient, int32(grid.tap_chunks))
        quotient, row_tile = divided(quotient, int32(grid.row_tiles))
        group, split = divided(quotient, int32(grid.splits))
        lane, row = int32(cuda.threadIdx.x % SIDE), int32(cuda.threadIdx.x // SIDE)
        first_m = int32(square_m * SIDE)
        rows_left = int32(min(block_m - first_m, grid.in_channels_per_group - row_tile * block_m - first_m))
        out_channels = weight.shape[1] // grid.splits
        ci, stage = int64(group) * grid.in_channels_per_group + row_tile * block_m + first_m, int64(number) * w_stage

        first_tap = int32(0)
        while first_tap < stage_taps:
            tap = tap_of(first_tap + lane)
            co, phase = int64(channel_chunk) * channels + tap.channel, phase_chunk * phases + tap.phase
            k = phase + (int64(chunk) * tap_chunk + tap.number) * rows
            inside = tap.channel < channels and co < out_channels and phase < grid.phases and k < weight.shape[2]
            co += split * out_channels
            m = row
            while m < SIDE:
                is_weight = inside and m < rows_left
                square[uint64(m * pitch + lane)] = load(weight[ci + m, co, k]) if is_weight else accumulator(0)
                m = int32(m + hop)
            cuda.syncthreads()
            q = row
            while q < SIDE:
                packed_row = row_of(first_tap + q)
                if first_tap + q < stage_taps and packed_row >= 0 and first_m + lane < block_m:
                    packed[uint64(stage + packed_row * block_m + first_m + lane)] = square[uint64(lane * pitch + q)]
                q = int32(q + hop)
            cuda.syncthreads()
            first_tap = int32(first_tap + SIDE)
        if square_m == 0 and cuda.threadIdx.x < w_stage - all_rows * block_m:
            packed[uint64(stage + all_rows * block_m + cuda.threadIdx.x)] = accumulator(0)

    signature = (strided(element.storage, 3), flat(accumulator), arguments(Grid))
    return Kernel("grad_input_pack", grad_input_pack, signature, THREADS, key=f"{config!r} {overlapped}")


def _stages(problem: Problem, config: Config) -> int:
    of_a_tile = math.prod(config.chunks_of(split(problem, config.splits)))
    return problem.groups * config.splits * config.row_tiles(problem) * of_a_tile


def pack_blocks(problem: Problem, config: Config) -> int:
    return _stages(problem, config) * -(-config.block_m // SIDE)


def prepare_pack(problem: Problem, config: Config, weight: Layout) -> tuple[torch.Tensor, Prepared]:
    """A stand-in for the packed weights, and the launch."""
    p, chunks = problem, config.chunks_of(split(problem, config.splits))
    phases = min(p.taps.rows, p.kernel_size)
    grid = of_problem(Grid, p, row_tiles=config.row_tiles(p), phases=phases, splits=config.splits, **chunks._asdict())
    w = alike(weight.shape, weight.dtype, weight.strides)
    packed = alike((_stages(p, config) * config.w_stage,), TORCH[ELEMENTS[config.dtype].accumulator.bitwidth])
    return packed, make_kernel(config.alone, config.overlaps_packing).prepare(pack_blocks(p, config), w, packed, grid)
