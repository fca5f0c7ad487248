"""Pack weights in the order in which grad_input_tile's blocks read them, in the accumulator's type.

A stage is (group, part of its output channels, row tile, tap chunk, part of the phases, channel chunk); within it
weights are (channel, phase, tap, m). Channels, phases and taps beyond the last are zeros. In a stage of all taps,
shorter phases have no place for a tap that they lack.

A block transposes squares through shared memory: it reads along the taps and writes along the rows."""

from __future__ import annotations

import math
from functools import cache

import torch
from numba import cuda, int32, int64, types, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.input.parts import split
from numba_tconv.kernels.common.integer import divided
from numba_tconv.ptx import SIMULATOR, device_function, griddepcontrol_launch_dependents
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat, strided

from .tile import Config

SIDE = 32  # of a square
THREADS = 64 if SIMULATOR else 256  # the simulator's threads are Python's
TORCH = {32: torch.float32, 64: torch.float64}


@cache
def make_kernel(config: Config, beside: bool) -> Kernel:
    """Make the packing kernel. ``beside``: the main kernel's blocks may begin once all blocks of this kernel have."""
    block_m, tap_chunk, w_stage, rows = config.block_m, config.tap_chunk, config.w_stage, config.taps.rows
    phases, long_phases = config.phases, config.long_phases
    channels, channel_taps = config.channels, config.channel_taps
    long_taps, places, squares_m = long_phases * tap_chunk, channels * channel_taps, -(-block_m // SIDE)
    stage_taps, hop = channels * tap_chunk * phases, THREADS // SIDE
    pitch = SIDE + 1  # rows and columns of a square lie in different banks
    numbers = SIDE * pitch
    element = ELEMENTS[config.dtype]
    load, accumulator = element.load, element.accumulator

    @device_function
    def parted(q):
        """Channel, tap and phase of a stage's ``q``-th tap in memory, where phases are neighbours."""
        rest = uint32(q) // uint32(phases)
        c = rest // uint32(tap_chunk)
        return int32(c), int32(rest - c * uint32(tap_chunk)), int32(q - rest * phases)

    @device_function
    def place_of(q):
        """The ``q``-th tap's row of block_m in the stage; -1 if it has no place."""
        c, b, a = parted(q)
        if long_phases and a >= long_phases:
            place = int32(long_taps + (a - long_phases) * (tap_chunk - 1) + b)
            return int32(c * channel_taps + place) if b < tap_chunk - 1 else int32(-1)
        return int32(c * channel_taps + a * tap_chunk + b)

    def grad_input_pack(w, packed, row_tiles, tap_chunks, channel_chunks, parts, phases_total, in_per_group, splits):
        if beside:
            griddepcontrol_launch_dependents()  # the main kernel copies its first windows meanwhile
        square = cuda.shared.array(numbers, dtype=accumulator)
        number, square_m = divided(int32(cuda.blockIdx.x), int32(squares_m))  # the stage; the square of its rows
        rest, channel_chunk = divided(number, int32(channel_chunks))
        rest, part = divided(rest, int32(parts))
        rest, chunk = divided(rest, int32(tap_chunks))
        rest, row_tile = divided(rest, int32(row_tiles))
        group, split = divided(rest, int32(splits))
        lane, row = int32(cuda.threadIdx.x % SIDE), int32(cuda.threadIdx.x // SIDE)
        first_m = int32(square_m * SIDE)
        rows_left = int32(min(block_m - first_m, in_per_group - row_tile * block_m - first_m))
        out_channels = w.shape[1] // splits
        ci, stage = int64(group) * in_per_group + row_tile * block_m + first_m, int64(number) * w_stage

        first = int32(0)
        while first < stage_taps:
            c, b, a = parted(first + lane)
            co, phase = int64(channel_chunk) * channels + c, part * phases + a
            k = phase + (int64(chunk) * tap_chunk + b) * rows
            inside = c < channels and co < out_channels and phase < phases_total and k < w.shape[2]
            co += split * out_channels
            m = row
            while m < SIDE:
                is_weight = inside and m < rows_left
                square[uint64(m * pitch + lane)] = load(w[ci + m, co, k]) if is_weight else accumulator(0)
                m = int32(m + hop)
            cuda.syncthreads()
            q = row
            while q < SIDE:
                place = place_of(first + q)
                if first + q < stage_taps and place >= 0 and first_m + lane < block_m:
                    packed[uint64(stage + place * block_m + first_m + lane)] = square[uint64(lane * pitch + q)]
                q = int32(q + hop)
            cuda.syncthreads()
            first = int32(first + SIDE)
        # Zeros fill the stage's last vector.
        if square_m == 0 and cuda.threadIdx.x < w_stage - places * block_m:
            packed[uint64(stage + places * block_m + cuda.threadIdx.x)] = accumulator(0)

    signature = (strided(element.storage, 3), flat(accumulator)) + (types.int64,) * 7
    return Kernel("grad_input_pack", grad_input_pack, signature, THREADS, key=f"{config!r} {beside}")


def _stages(problem: Problem, config: Config) -> int:
    """Stages of all blocks of the main kernel that have the same columns."""
    of_a_tile = math.prod(config.depth(split(problem, config.splits)))
    return problem.groups * config.splits * config.row_tiles(problem) * of_a_tile


def pack_blocks(problem: Problem, config: Config) -> int:
    """Blocks that pack the weights: one for each square along the rows of each stage."""
    return _stages(problem, config) * -(-config.block_m // SIDE)


def prepare_pack(problem: Problem, config: Config, strides: tuple) -> tuple[torch.Tensor, Prepared]:
    """A stand-in for the packed weights, and the launch that packs weights of ``strides``, in elements."""
    p, (tap_chunks, channel_chunks, parts) = problem, config.depth(split(problem, config.splits))
    row_tiles, phases = config.row_tiles(p), min(p.taps.rows, p.kernel_size)
    w = alike((p.in_channels, p.out_channels_per_group, p.kernel_size), config.dtype, strides)
    packed = alike((_stages(p, config) * config.w_stage,), TORCH[ELEMENTS[config.dtype].accumulator.bitwidth])
    integers = (row_tiles, tap_chunks, channel_chunks, parts, phases, p.in_channels_per_group, config.splits)
    return packed, make_kernel(config.alone, config.beside).prepare(pack_blocks(p, config), w, packed, *integers)
