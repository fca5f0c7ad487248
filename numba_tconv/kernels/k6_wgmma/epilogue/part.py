"""Store of k6 for tiles that hold a part of a long stride's phases: straight from registers.

Such a tile has one channel, and each column is a run of its own. A quad of lanes writes eight rows of a column to one
sector, so staging would gain nothing. Columns may belong to several samples or to none. A lane locates its columns one
by one, to save registers.
"""

from __future__ import annotations

import torch
from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.kernels.common.tensor_core.fragments import column_of
from numba_tconv.kernels.k6_wgmma.tile import Config
from numba_tconv.ptx import bits_of, device_function, pack_bf16, pack_f16, recomputed, repeated, st_global_if
from numba_tconv.runtime.elements import ELEMENTS

COLUMNS_OF_A_LANE = 4


def make_place(config: Config):
    """Build a device function that locates the outputs of column ``i`` of sample ``m``.

    ``row``: the tile's first phase. Returns the index in y for the tile's first row, which may not exist; the first row
    with an output; the number of outputs.
    """
    stride, all_phases, phases = config.tile.stride, config.tile.taps.rows, config.tile.phases

    @device_function
    def place(m, i, row, co, batch, first, out_channels, out_length, padding):
        o = (first + i) * stride + row - padding
        most = int64(min(phases, all_phases - row)) if m < batch else int64(0)  # fewer in a channel's last tile
        low = int32(min(max(-o, int64(0)), int64(phases)))
        size = int32(max(min(out_length - o, most) - low, int64(0)))
        return (m * out_channels + co) * out_length + o, low, size

    return place


def make_part_store(config: Config):
    """Build a device function that writes a tile's sums; arguments as in ``store_tile``, ``extra``: the bias."""
    tile, exact, sums = config.tile, config.tile.parts == 2, config.tile.rows // 2
    matrices, even_stride, halves = tile.rows // 8, tile.stride % 2 == 0, tile.out_dtype.itemsize == 2
    narrow = pack_f16 if tile.dtype == torch.float16 else pack_bf16
    store_type, words = ELEMENTS[tile.out_dtype].store, 2 * tile.out_dtype.itemsize // 4
    write, place = st_global_if(words), make_place(config)
    column_of_lane = device_function(column_of)

    @device_function
    def two_of(acc, k, q):
        """Return the lane's two sums of core matrix ``k`` in its column ``q``."""
        a = 4 * k + 2 * (q % 2) + q // 2 * sums
        return acc[a], acc[a + 1]

    @device_function
    def write_pair(k, state):
        acc, y, output, index, begin, size, extra, q = state
        even, odd = two_of(acc, k, q)
        if halves:
            output[0] = narrow(even + extra, odd + extra)
        else:
            output[0], output[1] = bits_of(even + extra), bits_of(odd + extra)
        write(uint32(begin + 8 * k) < uint32(size), y, index + 8 * k, output)

    @device_function
    def write_ones(k, state):
        acc, y, _, index, begin, size, extra, q = state
        even, odd = two_of(acc, k, q)
        if uint32(begin + 8 * k) < uint32(size):
            y[uint64(index + 8 * k)] = store_type(even + extra)
        if uint32(begin + 8 * k + 1) < uint32(size):
            y[uint64(index + 8 * k + 1)] = store_type(odd + extra)

    def make_write_column(write_rows):
        @device_function
        def write_column(q, state):
            acc, y, output, m, i, lane_row, extra, row, co, batch, sizes = state
            index, low, size = place(m, i + q, row, co, batch, *sizes)
            write_rows(int32(0), (acc, y, output, index + lane_row, int32(lane_row - low), size, extra, q))

        return repeated(write_column, COLUMNS_OF_A_LANE)

    by_pairs, by_ones = (make_write_column(repeated(rows, matrices)) for rows in (write_pair, write_ones))

    @device_function
    def store(acc, total, y, extra, warp, lane, n, j, row, co, batch, columns, first, out_channels, out_length, padding,
              alignment):  # fmt: skip
        lane = recomputed(lane)
        output = cuda.local.array(4, dtype=int32)
        # A lane's four columns lie in one sample, since samples begin at multiples of eight.
        m, i = int64(n), j + column_of_lane(warp, lane, 0, 0)
        if i >= columns:
            m, i = m + i // columns, i % columns
        sizes = first, out_channels, out_length, padding
        state = total if exact else acc, y, output, m, i, int32((lane & 3) * 2), extra, row, co, batch, sizes
        # If all runs begin and end at even indices, both or neither of two outputs exist.
        if even_stride and (alignment[0] | out_length | padding) & 1 == 0:
            by_pairs(int32(0), state)
        else:
            by_ones(int32(0), state)

    return store
