"""The general store: staged sums leave as long aligned runs.

The buffer holds a channel's outputs in memory order. Addresses alone decide where runs begin and end."""

import math

from numba import float32, int32, int64, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.ptx import device_function, st_shared
from numba_tconv.runtime.elements import ELEMENTS

from .fragments import column_of
from .outputs import Alignment, Extent
from .store_runs import outputs_at_once
from .tile import Tile, staged_at


def alignment_of(offset: int, problem: Problem, tile: Tile, in_fours: bool = False) -> Alignment:
    """The Alignment of an output ``offset`` bytes into a sector; ``in_fours``: staged by fours."""
    itemsize = tile.out_dtype.itemsize
    shift = offset // itemsize
    quantum = math.gcd(4, problem.out_length)
    staged = (shift - problem.padding) % quantum  # the first column is a multiple of eight
    if tile.span == 1 or in_fours or (tile.whole and not tile.aligned):
        quantum, staged = math.gcd(quantum, staged), 0
    at_once = outputs_at_once(quantum, itemsize)
    return Alignment(shift, quantum, staged, int(shift % at_once == 0 and problem.out_length % at_once == 0))


def make_stage_rows(tile: Tile):
    """Build ``stage_rows``: stages sums in memory order.

    ``values[first_value:]`` has the lane's sums of ``count`` rows: two of every eight from the round's row
    ``first_row`` on, four columns each. ``offset``: Alignment.offset."""
    span, spread, phases, run_pitch = tile.span, tile.spread, tile.phases, tile.pitch
    used_rows = tile.round_channels * tile.phases
    skip = tile.skip
    reciprocal = tile.reciprocal
    column_of_lane, place = device_function(column_of), device_function(staged_at)

    @device_function
    def stage_rows(values, first_value, count, first_row, staging, offset, thread):
        shared, base, at = staging
        lane = thread.lane
        column = int32(column_of_lane(thread.warp, lane, 0, 0))
        for r in range(count // 4):
            m = int32(first_row + r // 2 * 8 + (lane & 3) * 2 + r % 2)
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
                    shared[uint64(run + int32(place(at_u, skip)))] = values[a + q]

    return stage_rows


def make_aim(tile: Tile, to_the_output: bool = False):
    """Build ``aim`` and ``head_of`` for a tile from ``column`` of ``sample`` on.

    ``to_the_output``: runs may begin and end anywhere."""
    stride, span, advance, sector, whole = tile.stride, tile.span, tile.advance, tile.sector, tile.whole

    @device_function
    def aim(sample, column, out):
        """The Extent, and ``straight``: outputs and lanes' writes lie in one sample."""
        begin = (out.first_column + column) * stride - out.padding
        next_sample, next_column = sample, column + advance
        while next_column >= out.columns:
            next_sample, next_column = next_sample + 1, next_column - out.columns
        lowest = int32(max(-begin, int64(-sector)))
        highest = int32(max(min(out.length - begin, int64(advance * span)), int64(-sector)))
        goes_on, ends = next_sample == sample, next_column == 0
        alone = whole and sample < out.batch and (goes_on or (ends and next_sample == sample + 1))
        alone = alone and (sample == 0 or column == 0 or column * span >= sector)
        inside = alone and goes_on and begin >= sector and begin + advance * span <= out.length
        next_begin = (out.first_column + next_column) * stride - out.padding
        straight = alone and (to_the_output or inside or out.alignment.whole != 0)
        return Extent(begin, next_sample, next_begin, lowest, highest, goes_on, ends), straight

    @device_function
    def head_of(sample, channel, extent, out, warp):
        """Index in y of the warp's first own output, in one sample."""
        return (sample * out.channels + channel + warp) * out.length + extent.begin

    return aim, head_of


def make_store_any(tile: Tile, warps: int, add_bias: bool = False):
    """Build the store of a round of any tile; it returns the round's head.

    Adds the bias if ``add_bias``, or if the tile has gaps."""
    stride, dilation, all_rows, whole = tile.stride, tile.dilation, tile.taps.rows, tile.whole
    span, advance, overlap, sector = tile.span, tile.advance, tile.overlap, tile.sector
    partly = tile.by_phases  # one channel for all warps
    lanes = 32 * warps if partly else 32
    round_channels, pitch = tile.round_channels, tile.pitch
    load_type, store_type = ELEMENTS[tile.dtype].load, ELEMENTS[tile.out_dtype].store
    add_bias = add_bias or tile.has_gaps
    skip, slot_of = tile.skip, device_function(staged_at)

    @device_function
    def store_any(runs, out, staging, place, thread):
        n, j, row, co, channels_left = place.sample, place.column, place.row, place.channel, place.channels_left
        extent, head, y, bias, has_bias = place.extent, place.head, out.data, out.bias, out.has_bias
        batch, columns, first, padding = out.batch, out.columns, out.first_column, out.padding
        out_channels, out_length, alignment = out.channels, out.length, out.alignment
        shared, warp, lane = staging.shared, thread.warp, thread.lane
        begin, n_next, begin_next, ends = extent.begin, extent.next_sample, extent.next_begin, extent.ends
        shift, to_staged = alignment.shift, int32(alignment.offset + overlap * span)
        channel = int32(0 if partly else warp)
        while channel < min(round_channels, channels_left):
            added = load_type(bias[uint64(co + channel)]) if add_bias and has_bias else float32(0)
            source = int32(staging.at + channel * pitch)
            early, early_next = int32(0), int32(0)
            if sector > 1:
                early = int32(int32((n * out_channels + co + channel) * out_length + begin + shift) & (sector - 1))
                head_next = (n_next * out_channels + co + channel) * out_length + begin_next
                early_next = int32(0) if ends else int32(int32(head_next + shift) & (sector - 1))
            end = int32(advance * span - early_next)
            sample = n - 2 if j > 0 and j * span < sector else n
            while sample <= n_next:
                if sample >= 0 and sample < batch:
                    line = (sample * out_channels + co + channel) * out_length
                    from_first = (n - sample) * columns + j
                    if whole:
                        offset = begin + (n - sample) * columns * stride
                        e = int32(min(max(int64(-early), -offset), int64(end)))
                        e_end = int32(max(min(int64(end), out_length - offset), int64(-sector)))
                        e = int32(max(int64(e), -from_first * span)) + lane
                        e_end = int32(min(int64(e_end), (columns - from_first) * span))
                        while e < e_end:
                            u = int32(e + to_staged)
                            value = shared[uint64(source + int32(slot_of(u, skip)))]
                            if add_bias:
                                value += added
                            y[uint64(line + offset + e)] = store_type(value)
                            e = int32(e + 32)
                    else:
                        e = int32(warp * 32 + lane) if partly else int32(lane)
                        while e < end:
                            column = int32(e // span)
                            rest = int32(e - column * span)
                            i = from_first + column
                            o = (first + i) * stride + row * dilation + rest - padding
                            valid = i >= 0 and i < columns and o >= 0 and o < out_length
                            if valid and (not partly or row + rest < all_rows):
                                u = int32(e + to_staged)
                                value = shared[uint64(source + int32(slot_of(u, skip)))]
                                if add_bias:
                                    value += added
                                y[uint64(line + o)] = store_type(value)
                            e = int32(e + lanes)
                sample += 1
            channel = int32(channel + warps)
        return head

    return store_any
