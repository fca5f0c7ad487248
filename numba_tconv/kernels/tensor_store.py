"""The last step of the tensor-core rungs: sums that lie in shared memory leave as long runs from aligned starts.

The staging buffer holds, for each channel of a round, the outputs of the tile's columns in the order of memory, phases
interleaved, so a warp writes a channel's run with consecutive lanes on consecutive outputs. Where the run begins and
ends is decided by the addresses of the output (tensor_tile.py): a tile and the next one agree on it without talking.
"""

from __future__ import annotations

import math

import torch
from numba import cuda, float32, int32, int64, uint64

from ..elements import ELEMENTS
from ..problem import Problem
from ..ptx import bits_of, device_function, ld_shared, pack_bf16, pack_f16, st_global, st_shared
from .fragments import column_of
from .tensor_tile import SECTOR, Tile


def alignment_of(y: torch.Tensor, problem: Problem, tile: Tile, in_fours: bool = False) -> tuple[int, int, int]:
    """How the runs of output ``y`` lie: elements from a sector boundary to y's first one; how many consecutive staged
    outputs can be loaded together (4, 2 or 1); and the place in the staging buffer that makes them begin at such a
    multiple, if it is the same for all runs. Where outputs are staged by fours (``in_fours``, and the rows of a lone
    phase) they cannot begin elsewhere."""
    shift = y.data_ptr() % SECTOR // y.element_size()
    quantum = math.gcd(4, problem.out_length)
    offset = (shift - problem.padding) % quantum  # a tile's first output is a multiple of eight, less the padding
    if tile.span == 1 or in_fours:
        quantum, offset = math.gcd(quantum, offset), 0
    return shift, quantum, offset


def make_stage_rows(tile: Tile):
    """A device function: put sums into the staging buffer, in the order of memory.

    ``values`` holds, from ``first_value`` on, the lane's sums of ``count`` rows, the round's from ``m0`` on: of every
    eight rows two are the lane's, and of a row its four columns. ``offset``: see ``alignment_of``.
    """
    span, spread, phases, run_pitch = tile.span, tile.spread, tile.phases, tile.pitch
    used_rows = tile.round_channels * tile.phases
    skip = tile.skip
    reciprocal = tile.reciprocal
    column_of_lane = cuda.jit(device=True, inline="always")(column_of)

    @device_function
    def stage_rows(values, first_value, count, shared, base, at, m0, offset, warp, lane):
        column = int32(column_of_lane(warp, lane, 0, 0))
        for r in range(count // 4):
            m = int32(m0 + r // 2 * 8 + (lane & 3) * 2 + r % 2)
            a = first_value + 4 * r
            if span == 1:
                place_at = int32(base + (at + m * run_pitch + column) * 4)
                st_shared(place_at, values[a], values[a + 1], values[a + 2], values[a + 3])
            elif m < used_rows:
                channel = int32((m * reciprocal) >> 16)
                u = int32(column * span + (m - channel * phases) * spread + int32(offset))
                run = int32(at + channel * run_pitch)
                for q in range(4):
                    at_u = int32(u + q * span)
                    shared[uint64(run + int32(at_u + (at_u >> 5) * skip))] = values[a + q]

    return stage_rows


def make_store(tile: Tile, warps: int, add_bias: bool = False):
    """Four device functions, in which ``warps`` warps write the tile's runs, one round of channels after another.

    ``aim``: once a tile, where its outputs are. Tiles of which all runs lie inside of a sample go by ``aim_inside``,
    once a tile, and ``store_inside``: straight-line code, since with few warps nothing hides what a branch
    costs. ``store_any`` takes all others: at the ends of samples and of the channels, and with several samples in
    a tile.

    ``n``, ``j``: sample and column (within the sample) where the tile's own outputs begin. ``row``: the first row of
    taps of the tile. ``co``: the first channel, of the tile or (store_any) the round; ``channels_left``: how many
    channels there are from it on. ``base``, ``at``: the shared memory, in bytes, and the staging buffer in it, in
    elements. ``alignment``: see ``alignment_of``. Both stores take all of these, so that either can stand in a kernel's
    place for it; ``bias`` is added here if ``add_bias``, and where some outputs are nothing else (Tile.empty_slots).
    """
    stride, dilation, all_rows, whole = tile.stride, tile.dilation, tile.taps.rows, tile.whole
    span, advance, overlap, sector = tile.span, tile.advance, tile.overlap, tile.sector
    partly = not whole and dilation == 1  # the last tile of a channel may have fewer rows than the others
    round_channels, pitch = tile.round_channels, tile.pitch
    halves = tile.itemsize == 2
    narrow = pack_f16 if tile.dtype == torch.float16 else pack_bf16
    load_type, store_type = ELEMENTS[tile.dtype].load, ELEMENTS[tile.dtype].store
    add_bias = add_bias or tile.empty_slots
    skip = tile.skip
    # Outputs that a lane writes at once, by how many staged ones it can load together.
    wide4, wide1 = 16 // tile.itemsize, 4 // tile.itemsize
    step4, step1 = 32 * wide4, 32 * wide1
    channels_a_warp, equal_shares = -(-round_channels // warps), round_channels % warps == 0

    def steps(outputs):
        """Steps of a warp, ``outputs`` each, that every run has, and those that it may have beyond."""
        full = (advance * span - (sector - 1)) // outputs if whole else 0
        return full, -(-(advance * span + sector - 1) // outputs) - full

    (full4, last4), (full2, last2), (full1, last1) = steps(step4), steps(64), steps(step1)
    load4, load2 = ld_shared(4, float32), ld_shared(2, float32)
    st_global4, st_global2 = st_global(4), st_global(2)
    st_global1 = st_global(1)

    @device_function
    def place(u):
        return int32(u + (u >> 5) * skip)

    @device_function
    def put4(y, target, base, source, u, extra):
        """16 bytes of outputs, of which the first is staged at ``u``, a multiple of four."""
        a, b, c, d = load4(base + (source + place(u)) * 4)
        if halves:
            e, f, g, h = load4(base + (source + place(int32(u + 4))) * 4)
            st_global4(y, target, narrow(a + extra, b + extra), narrow(c + extra, d + extra),
                       narrow(e + extra, f + extra), narrow(g + extra, h + extra))  # fmt: skip
        else:
            st_global4(y, target, bits_of(a + extra), bits_of(b + extra), bits_of(c + extra), bits_of(d + extra))

    @device_function
    def put2(y, target, base, source, u, extra):
        a, b = load2(base + (source + place(u)) * 4)
        if halves:
            st_global1(y, target, narrow(a + extra, b + extra))
        else:
            st_global2(y, target, bits_of(a + extra), bits_of(b + extra))

    @device_function
    def put1(y, target, shared, source, u, extra):
        """One output, or the two of a 4-byte word."""
        a = shared[uint64(source + place(u))] + extra
        if halves:
            st_global1(y, target, narrow(a, shared[uint64(source + place(int32(u + 1)))] + extra))
        else:
            y[uint64(target)] = a

    @device_function
    def aim(n, j, batch, columns, first, out_length, padding):
        """Output where the tile's own begin; sample, and output, where the next tile's do; whether all of them exist
        and lie in one sample."""
        begin = (first + j) * stride - padding
        n_next, j_next = n, j + advance
        while j_next >= columns:
            n_next, j_next = n_next + 1, j_next - columns
        inside = whole and n_next == n and n < batch and begin >= sector and begin + advance * span <= out_length
        return begin, n_next, (first + j_next) * stride - padding, inside

    @device_function
    def aim_inside(n, begin, warp, co, out_channels, out_length):
        """Index in y of the output e = 0 of the warp's first channel of the first round."""
        return (n * out_channels + co + warp) * out_length + begin

    @device_function
    def store_inside(head, y, shared, base, at, bias, has_bias, warp, lane, n, j, begin, n_next, begin_next, row, co,
                     channels_left, batch, columns, first, out_channels, out_length, padding,
                     alignment):  # fmt: skip
        """Write a round. Returns ``head`` of the next."""
        shift, quantum, to_staged = alignment[0], alignment[1], int32(alignment[2] + overlap * span)
        for z in range(channels_a_warp):
            channel = int32(warp + z * warps)
            if equal_shares or channel < round_channels:
                extra = load_type(bias[uint64(co + channel)]) if add_bias and has_bias else float32(0)
                # The run, from its first sector to that of the next tile.
                run = head + z * (warps * out_length)
                early = int32(int32(run + shift) & (sector - 1))
                end = int32(advance * span - ((early + advance * span) & (sector - 1)))
                source = int32(at + channel * pitch)
                if quantum == 4:
                    e = int32(lane * wide4 - early)
                    for h in range(full4):
                        put4(y, run + (e + h * step4), base, source, int32(e + h * step4 + to_staged), extra)
                    for h in range(full4, full4 + last4):
                        if e + h * step4 < end:
                            put4(y, run + (e + h * step4), base, source, int32(e + h * step4 + to_staged), extra)
                elif quantum == 2:
                    e = int32(lane * 2 - early)
                    for h in range(full2):
                        put2(y, run + (e + h * 64), base, source, int32(e + h * 64 + to_staged), extra)
                    for h in range(full2, full2 + last2):
                        if e + h * 64 < end:
                            put2(y, run + (e + h * 64), base, source, int32(e + h * 64 + to_staged), extra)
                else:
                    e = int32(lane * wide1 - early)
                    for h in range(full1):
                        put1(y, run + (e + h * step1), shared, source, int32(e + h * step1 + to_staged), extra)
                    for h in range(full1, full1 + last1):
                        if e + h * step1 < end:
                            put1(y, run + (e + h * step1), shared, source, int32(e + h * step1 + to_staged), extra)
        return head + round_channels * out_length

    @device_function
    def store_any(head, y, shared, base, at, bias, has_bias, warp, lane, n, j, begin, n_next, begin_next, row, co,
                  channels_left, batch, columns, first, out_channels, out_length, padding,
                  alignment):  # fmt: skip
        shift, to_staged = alignment[0], int32(alignment[2] + overlap * span)
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
                            u = int32(e + to_staged)
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
                                u = int32(e + to_staged)
                                value = shared[uint64(source + int32(u + (u >> 5) * skip))]
                                if add_bias:
                                    value += extra
                                y[uint64(line + o)] = store_type(value)
                            e = int32(e + 32)
                m += 1
            channel = int32(channel + warps)
        return head

    return aim, aim_inside, store_inside, store_any
