"""The producer of k5 with resident weights: a team copies windows into its ring, up to its next tiles."""

from __future__ import annotations

from numba import cuda, int32, int64, uint64

from numba_tconv.ptx import cp_async_commit, cp_async_to, device_function, st_shared_u16

from .producer import make_half, make_load_along, make_window_of
from .tile import Config


def make_load_ahead(config: Config):
    """Device functions ``aim``, ``load`` and ``next_stage`` for a team's windows.

    * ``aim``: the address of the thread's first copy at the first channel, and the last channel at which a stage begins
      that is copied in steps within one sample; -1 if there is none.
    * ``load``: start the copies of the stage ``ahead``, if its tile exists, and commit a group.
    * ``next_stage``: the stage after ``ahead``.

    ``ahead``: tile, sample and column where the tile's own outputs begin, chunk of taps, channel, and what ``aim``
    returned. ``steps``: tiles to the team's next tile, the same as samples and columns, chunks of taps, tiles.
    ``signal``, ``rows``, ``thread``: as in producer.make_window_of. ``to``: shared address of the thread's first copy.
    """
    tile, depth, pitch, itemsize, width = config.tile, config.depth, config.pitch, config.tile.itemsize, config.width
    vector, per_row, lanes, rows_at_once = config.x_vector, config.copies_a_row, config.row_lanes, config.rows_at_once
    before, shift, rows_of_thread = tile.overlap + tile.lead, tile.chunk_shift, -(-depth // rows_at_once)
    copy, half = cp_async_to(vector * itemsize), make_half()
    window_of, load_along = make_window_of(config), make_load_along(config)

    @device_function
    def begin(n, j, chunk, columns):
        """Sample and column where a window begins."""
        c = int32(j - before - chunk * shift)
        while c < 0:
            n, c = int32(n - 1), int32(c + columns)
        return n, c

    @device_function
    def aim(x, n, j, chunk, exists, thread, signal, rows):
        n, c = begin(n, j, chunk, signal[2])
        source, along = window_of(x, n, c, thread, signal, rows)
        return source, int32(rows[0] - depth) if exists and along else int32(-1)

    @device_function
    def load_anywhere(to, x, n, j, chunk, channel, thread, signal, rows):
        batch, length, columns, first = signal
        channels, group_row, stride_n, stride_c = rows
        row, p0 = thread
        n, c = begin(n, j, chunk, columns)
        p = int32(p0)
        while p < per_row:
            m, k = n, int32(c + p * vector)
            while k >= columns:
                m, k = int32(m + 1), int32(k - columns)
            i = int32(first + k)
            inside = m >= 0 and m < batch and i >= 0 and i < length
            used = int32(min(int32(vector), int32(length - i)) * itemsize) if inside else int32(0)
            r = int32(row)
            while r < depth:
                exists = inside and channel + r < channels
                source = group_row + int64(m) * stride_n + int64(channel + r) * stride_c + i
                at = int32(to + ((r - row) * pitch + (p - p0) * vector) * itemsize)
                copy(at, x, source if exists else int64(0), used if exists else int32(0))
                r = int32(r + rows_at_once)
            p = int32(p + lanes)

    @device_function
    def load_elements(to, x, n, j, chunk, channel, thread, signal, rows):
        """The same for 16-bit elements in rows that begin within words: through registers, to where copies by words
        would put them.
        """
        batch, length, columns, first = signal
        channels, group_row, stride_n, stride_c = rows
        row, p0 = thread
        values = cuda.local.array(rows_of_thread, dtype=int32)
        to = int32(to + (half(x, group_row + int64(n) * stride_n + int64(row) * stride_c) - p0 * vector) * itemsize)
        n, c = begin(n, j, chunk, columns)
        p = int32(p0)
        while p < width:
            m, k = n, int32(c + p)
            while k >= columns:
                m, k = int32(m + 1), int32(k - columns)
            i = int32(first + k)
            inside = m >= 0 and m < batch and i >= 0 and i < length
            source = group_row + int64(m) * stride_n + int64(channel + row) * stride_c + i
            for z in range(rows_of_thread):
                exists = inside and channel + row + z * rows_at_once < channels
                values[z] = int32(x[uint64(source + z * rows_at_once * stride_c)]) if exists else int32(0)
            for z in range(rows_of_thread):
                if (z + 1) * rows_at_once <= depth or row < depth - z * rows_at_once:
                    st_shared_u16(int32(to + (z * rows_at_once * pitch + p) * itemsize), values[z])
            p = int32(p + lanes)

    load_slowly = load_elements if config.turned else load_anywhere

    @device_function
    def load(ahead, to, x, tiles, thread, signal, rows):
        next_tile, n, j, chunk, channel, source, last = ahead
        if channel <= last:
            load_along(to, source, rows[3], thread)
        elif next_tile < tiles:
            load_slowly(to, x, n, j, chunk, channel, thread, signal, rows)
        cp_async_commit()

    @device_function
    def next_stage(ahead, x, steps, thread, signal, rows):
        next_tile, n, j, chunk, channel, source, last = ahead
        stride, n_step, j_step, tap_chunks, tiles = steps
        channel, source = int32(channel + depth), source + depth * itemsize * rows[3]
        if channel >= rows[0]:
            channel, chunk = int32(0), int32(chunk + 1)
            if chunk == tap_chunks:
                chunk, next_tile = int32(0), int32(next_tile + stride)
                n, j = int32(n + n_step), int32(j + j_step)
                if j >= signal[2]:
                    n, j = int32(n + 1), int32(j - signal[2])
            source, last = aim(x, n, j, chunk, next_tile < tiles, thread, signal, rows)
        return next_tile, n, j, chunk, channel, source, last

    return aim, load, next_stage
