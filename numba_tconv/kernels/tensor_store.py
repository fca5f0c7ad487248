"""The last step of the tensor-core rungs: sums that lie in shared memory leave as long runs from aligned starts.

The staging buffer holds, for each channel of a round, the outputs of the tile's columns in the order of memory, phases
interleaved, so a warp writes a channel's run with consecutive lanes on consecutive outputs. Where the run begins and
ends is decided by the addresses of the output (tensor_tile.py): a tile and the next one agree on it without talking.
"""

from __future__ import annotations

import torch
from numba import cuda, float32, int32, int64, uint64

from ..elements import ELEMENTS
from ..ptx import pack_bf16, pack_f16, st_global, st_shared
from .fragments import column_of
from .tensor_tile import Tile


def make_stage_rows(tile: Tile):
    """A device function: put sums into the staging buffer, in the order of memory.

    ``values`` holds, from ``first_value`` on, the lane's sums of ``count`` rows, the round's from ``m0`` on: of every
    eight rows two are the lane's, and of a row its four columns.
    """
    span, spread, phases, run_pitch = tile.span, tile.spread, tile.phases, tile.pitch
    used_rows = tile.round_channels * tile.phases
    skip = tile.skip
    reciprocal = tile.reciprocal
    column_of_lane = cuda.jit(device=True, inline="always")(column_of)

    @cuda.jit(device=True, inline="always")
    def stage_rows(values, first_value, count, shared, base, at, m0, warp, lane):
        column = int32(column_of_lane(warp, lane, 0, 0))
        for r in range(count // 4):
            m = int32(m0 + r // 2 * 8 + (lane & 3) * 2 + r % 2)
            a = first_value + 4 * r
            if span == 1:
                place_at = int32(base + (at + m * run_pitch + column) * 4)
                st_shared(place_at, values[a], values[a + 1], values[a + 2], values[a + 3])
            elif m < used_rows:
                channel = int32((m * reciprocal) >> 16)
                u = int32(column * span + (m - channel * phases) * spread)
                run = int32(at + channel * run_pitch)
                for q in range(4):
                    at_u = int32(u + q * span)
                    shared[uint64(run + int32(at_u + (at_u >> 5) * skip))] = values[a + q]

    return stage_rows


def make_store(tile: Tile, warps: int):
    """Four device functions, in which ``warps`` warps write the tile's runs, one round of channels after another.

    ``aim``: once a tile, where its outputs are. Tiles of which all runs lie inside of a sample go by ``aim_inside``,
    once a tile, and ``store_inside``: straight-line code, since with few warps nothing hides what a branch
    costs. ``store_any`` takes all others: at the ends of samples and of the channels, and with several samples in
    a tile.

    ``n``, ``j``: sample and column (within the sample) where the tile's own outputs begin. ``row``: the first row of
    taps of the tile. ``co``: the first channel, of the tile or (store_any) the round; ``channels_left``: how many
    channels there are from it on. ``at``: the staging buffer, in elements. ``shift``: of y's first element from a
    sector boundary, in elements. Both stores take all of these, so that either can stand in a kernel's place for it;
    ``bias`` is added here only where some outputs are nothing else (Tile.empty_slots).
    """
    stride, dilation, all_rows, whole = tile.stride, tile.dilation, tile.taps.rows, tile.whole
    span, advance, overlap, sector = tile.span, tile.advance, tile.overlap, tile.sector
    partly = not whole and dilation == 1  # the last tile of a channel may have fewer rows than the others
    round_channels, pitch = tile.round_channels, tile.pitch
    channels_a_warp, equal_shares = -(-round_channels // warps), round_channels % warps == 0
    wide = 4 // tile.itemsize  # outputs that a lane writes at a time: 4 bytes
    narrow = pack_f16 if tile.dtype == torch.float16 else pack_bf16
    load_type, store_type = ELEMENTS[tile.dtype].load, ELEMENTS[tile.dtype].store
    step = 32 * wide
    full = (advance * span - (sector - 1)) // step if whole else 0  # steps that every run has
    last = -(-(advance * span + sector - 1) // step) - full  # steps that a run may have beyond
    step_staged = step + wide * tile.skip
    add_bias = tile.empty_slots
    skip = tile.skip

    @cuda.jit(device=True, inline="always")
    def put(y, target, shared, source, source2, extra):
        """One output, or the two of a 4-byte word."""
        first, second = shared[uint64(source)], shared[uint64(source2)]
        if add_bias:
            first, second = first + extra, second + extra
        if wide == 2:
            st_global(y, target, narrow(first, second))
        else:
            y[uint64(target)] = first

    @cuda.jit(device=True, inline="always")
    def aim(n, j, batch, columns, first, out_length, padding):
        """Output where the tile's own begin; sample, and output, where the next tile's do; whether all of them exist
        and lie in one sample."""
        begin = (first + j) * stride - padding
        n_next, j_next = n, j + advance
        while j_next >= columns:
            n_next, j_next = n_next + 1, j_next - columns
        inside = whole and n_next == n and n < batch and begin >= sector and begin + advance * span <= out_length
        return begin, n_next, (first + j_next) * stride - padding, inside

    @cuda.jit(device=True, inline="always")
    def aim_inside(heads, n, begin, warp, co, out_channels, out_length):
        """``heads[z]``: index in y of the output e = 0 of the warp's z-th channel of the first round."""
        for z in range(channels_a_warp):
            heads[z] = (n * out_channels + co + warp + z * warps) * out_length + begin

    @cuda.jit(device=True, inline="always")
    def store_inside(heads, y, shared, at, bias, has_bias, warp, lane, n, j, begin, n_next, begin_next, row, co,
                     channels_left, batch, columns, first, out_channels, out_length, padding, shift):  # fmt: skip
        """Write a round, and move ``heads`` on to the next."""
        for z in range(channels_a_warp):
            channel = int32(warp + z * warps)
            if equal_shares or channel < round_channels:
                early = int32(int32(heads[z] + shift) & (sector - 1))
                extra = load_type(bias[uint64(co + channel)]) if add_bias and has_bias else float32(0)
                # The run, from its first sector on: ``full`` steps of the warp, and what the next tile leaves.
                e = int32(lane * wide - early)
                u = int32(e + overlap * span)
                source = int32(at + channel * pitch)
                a, b = int32(source + (u + (u >> 5) * skip)), int32(source + (u + 1 + (int32(u + 1) >> 5) * skip))
                target = heads[z] + e
                for h in range(full):
                    put(y, target + h * step, shared, a + h * step_staged, b + h * step_staged, extra)
                rest = int32(advance * span + early - ((early + advance * span) & (sector - 1)) - full * step)
                for h in range(last):
                    if lane * wide < rest - h * step:
                        put(y, target + (full + h) * step, shared, a + (full + h) * step_staged,
                            b + (full + h) * step_staged, extra)  # fmt: skip
            heads[z] += round_channels * out_length

    @cuda.jit(device=True, inline="always")
    def store_any(heads, y, shared, at, bias, has_bias, warp, lane, n, j, begin, n_next, begin_next, row, co,
                  channels_left, batch, columns, first, out_channels, out_length, padding, shift):  # fmt: skip
        channel = int32(warp)
        while channel < min(round_channels, channels_left):
            extra = load_type(bias[uint64(co + channel)]) if add_bias and has_bias else float32(0)
            source = int32(at + channel * pitch)
            early, early_next = int32(0), int32(0)
            if sector > 1:
                early = int32(int32((n * out_channels + co + channel) * out_length + begin + shift) & (sector - 1))
                head_next = (n_next * out_channels + co + channel) * out_length + begin_next
                early_next = int32(int32(head_next + shift) & (sector - 1))
            end = int32(advance * span - early_next)
            m = n - 2 if j * span < sector else n  # a run that begins early may begin in a sample before, however short
            while m <= n_next:
                if m >= 0 and m < batch:
                    line = (m * out_channels + co + channel) * out_length
                    from_first = (n - m) * columns + j  # columns from the sample's first one to the tile's own first
                    if whole:
                        offset = begin + (n - m) * columns * stride  # output of the sample that e = 0 is
                        e = int32(min(max(int64(-early), -offset), int64(end)))
                        e_end = int32(max(min(int64(end), out_length - offset), int64(-sector)))
                        e = int32(max(int64(e), -from_first * span)) + lane
                        e_end = int32(min(int64(e_end), (columns - from_first) * span))
                        while e < e_end:
                            u = int32(e + overlap * span)
                            value = shared[uint64(source + int32(u + (u >> 5) * skip))]
                            if add_bias:
                                value += extra
                            y[uint64(line + offset + e)] = store_type(value)
                            e = int32(e + 32)
                    else:
                        e = int32(lane)
                        while e < end:
                            column = int32(e // span)
                            rest = int32(e - column * span)
                            i = from_first + column
                            o = (first + i) * stride + row * dilation + rest - padding
                            valid = i >= 0 and i < columns and o >= 0 and o < out_length
                            if valid and (not partly or row + rest < all_rows):
                                u = int32(e + overlap * span)
                                value = shared[uint64(source + int32(u + (u >> 5) * skip))]
                                if add_bias:
                                    value += extra
                                y[uint64(line + o)] = store_type(value)
                            e = int32(e + 32)
                m += 1
            channel = int32(channel + warps)

    return aim, aim_inside, store_inside, store_any, channels_a_warp
