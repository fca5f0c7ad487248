"""Store of a part of a long stride's phases, from registers.

A tile has one channel, and each column is a run: four lanes write eight rows to a sector. Columns may lie in several
samples or none; to save registers, lanes locate them one by one."""

from typing import NamedTuple

import torch
from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.kernels.common.tensor_core.fragments import column_of
from numba_tconv.kernels.k6_wgmma.tile import Config
from numba_tconv.ptx import bits_of, device_function, pack_bf16, pack_f16, recomputed, repeated, st_global_if
from numba_tconv.runtime.elements import ELEMENTS

COLUMNS_OF_A_LANE = 4


class Lane(NamedTuple):
    sums: object
    words: object
    out: object
    place: object
    sample: int
    column: int
    row: int
    bias: float


class Rows(NamedTuple):
    """A lane's outputs in a column."""

    lane: Lane
    first: int  # the first output's index in y
    begin: int  # its place in the column
    size: int  # of the column
    column: int  # of the lane's four


def make_place(config: Config):
    """Build a column's place: index in y of the tile's first row; first row inside y; rows inside."""
    stride, all_phases, phases = config.tile.stride, config.tile.taps.rows, config.tile.phases

    @device_function
    def outputs_of(sample, column, place, out):
        o = (out.first_column + column) * stride + place.row - out.padding
        most = int64(min(phases, all_phases - place.row)) if sample < out.batch else int64(0)
        low = int32(min(max(-o, int64(0)), int64(phases)))
        size = int32(max(min(out.length - o, most) - low, int64(0)))
        return (sample * out.channels + place.channel) * out.length + o, low, size

    return outputs_of


def make_phases_store(config: Config):
    tile, exact, half = config.tile, config.tile.operand_halves == 2, config.tile.rows // 2
    matrices, even_stride, halves = tile.rows // 8, tile.stride % 2 == 0, tile.out_dtype.itemsize == 2
    narrow = pack_f16 if tile.dtype == torch.float16 else pack_bf16
    store_type, count = ELEMENTS[tile.out_dtype].store, 2 * tile.out_dtype.itemsize // 4
    write, outputs_of = st_global_if(count), make_place(config)
    column_of_lane = device_function(column_of)

    @device_function
    def two_of(acc, k, q):
        """The lane's sums of core matrix ``k`` in column ``q``."""
        a = 4 * k + 2 * (q % 2) + q // 2 * half
        return acc[a], acc[a + 1]

    @device_function
    def write_pair(k, rows):
        lane = rows.lane
        even, odd = two_of(lane.sums, k, rows.column)
        if halves:
            lane.words[0] = narrow(even + lane.bias, odd + lane.bias)
        else:
            lane.words[0], lane.words[1] = bits_of(even + lane.bias), bits_of(odd + lane.bias)
        write(uint32(rows.begin + 8 * k) < uint32(rows.size), lane.out.data, rows.first + 8 * k, lane.words)

    @device_function
    def write_ones(k, rows):
        lane = rows.lane
        even, odd = two_of(lane.sums, k, rows.column)
        if uint32(rows.begin + 8 * k) < uint32(rows.size):
            lane.out.data[uint64(rows.first + 8 * k)] = store_type(even + lane.bias)
        if uint32(rows.begin + 8 * k + 1) < uint32(rows.size):
            lane.out.data[uint64(rows.first + 8 * k + 1)] = store_type(odd + lane.bias)

    def make_write_column(write_rows):
        @device_function
        def write_column(q, lane):
            first, low, size = outputs_of(lane.sample, lane.column + q, lane.place, lane.out)
            write_rows(int32(0), Rows(lane, first + lane.row, int32(lane.row - low), size, q))

        return repeated(write_column, COLUMNS_OF_A_LANE)

    by_pairs, by_ones = (make_write_column(repeated(rows, matrices)) for rows in (write_pair, write_ones))

    @device_function
    def store(sums, out, place, bias, thread):
        lane = recomputed(thread.lane)
        words = cuda.local.array(4, dtype=int32)
        # All four are of one sample: samples begin at multiples of eight.
        sample, column = int64(place.sample), place.column + column_of_lane(thread.warp, lane, 0, 0)
        if column >= out.columns:
            sample, column = sample + column // out.columns, column % out.columns
        own = sums.total if exact else sums.acc
        of_lane = Lane(own, words, out, place, sample, column, int32((lane & 3) * 2), bias)
        # Both outputs exist, or neither.
        if even_stride and (out.alignment.shift | out.length | out.padding) & 1 == 0:
            by_pairs(int32(0), of_lane)
        else:
            by_ones(int32(0), of_lane)

    return store
