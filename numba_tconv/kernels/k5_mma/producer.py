"""The producer of k5: the copies of a stage, of inputs and weights.

A copy takes 16 bytes where all rows of x are aligned so, else a word of 4 bytes. Within one sample's signal a thread's
copies follow in steps from one address; other windows are listed in a table.

Where rows of 16-bit elements begin within a word, copies begin with the window's first word and take one word more, and
the reader turns the columns back (``make_turns``, mainloop.py).
"""

from __future__ import annotations

from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.ptx import (
    cp_async_to,
    cp_async_vector,
    cp_async_word,
    device_function,
    global_address,
    ld_shared,
    recomputed,
)

from .mainloop import NEXT, OWN
from .tile import Config

BATCH = 8  # elements in flight of a thread, where cp.async cannot copy them


def make_load(config: Config):
    """Device functions ``aim``, which finds where a window lies in x, and ``load``, which starts the copies of a stage.

    ``aim`` writes the table and returns the address of the thread's first copy at the group's first channel, and the
    last channel at which a stage begins that is copied in steps; -1 if there is none. ``rows``: channels, index in x of
    the group's first row in the first sample, strides of samples and channels. ``turns``: ``make_turns``.
    """
    tile, threads, depth, pitch = config.tile, config.threads, config.depth, config.pitch
    itemsize, turned, in_steps = tile.itemsize, config.turned, config.in_steps
    vector, per_row = (1 if turned else config.x_vector), config.table_entries
    before, advance, shift = tile.overlap + tile.lead, tile.advance, tile.chunk_shift
    x_stage, w_stage = config.x_stage, config.w_stage
    row_lanes = max(1, threads // depth)  # threads that copy one row of x
    rows_at_once = threads // row_lanes
    row_copies, w_copies = -(-per_row // row_lanes), -(-w_stage // (16 * threads))
    table_at, entry = config.table, ld_shared(4, int32)
    copy_x, copy_w = cp_async_to(max(4, vector * itemsize)), cp_async_to(16)
    window_of, load_along = make_window_of(config), make_load_along(config)
    lanes, step = config.row_lanes, config.x_vector

    @device_function
    def joined(low, high):
        return int64(high) << 32 | int64(uint32(low))

    @device_function
    def place_of(thread):
        """A thread's first row of a stage, and its first copy of each row, for copies in steps."""
        return int32(uint32(thread) // uint32(lanes)), int32(uint32(thread) % uint32(lanes))

    @device_function
    def aim(table, x, column_tile, chunk, batch, length, columns, first, stride_l, rows):
        n, j = divmod(column_tile * advance - before - chunk * shift, columns)
        p = int32(cuda.threadIdx.x)
        source, last = int64(0), int32(-1)
        if in_steps:
            source, along = window_of(x, n, j, place_of(p), (batch, length, columns, first), rows)
            if along and stride_l == 1:
                last = int32(rows[0] - depth)
        while p < per_row:
            m, c = n, j + p * vector
            while c >= columns:
                m, c = m + 1, c - columns
            i = first + c
            inside = m >= 0 and m < batch and i >= 0 and i < length
            at = m * rows[2] + i * stride_l if inside else int64(0)
            entry = int32(table_at // 4 + 4 * p)
            table[uint64(entry)], table[uint64(entry + 1)] = int32(at & 0xFFFFFFFF), int32(at >> 32)
            table[uint64(entry + 2)] = int32(min(int64(vector), length - i) * itemsize) if inside else int32(0)
            p = int32(p + threads)
        return source, last

    @device_function
    def load_weights(target, thread, w, w_offset):
        from_w, to_w = w_offset + thread * (16 // itemsize), int32(target + x_stage + thread * 16)
        for z in range(w_copies):
            if w_stage % (16 * threads) == 0 or z < w_copies - 1 or thread < w_stage // 16 % threads:
                copy_w(to_w + z * (threads * 16), w, from_w + z * (threads * 16 // itemsize), 16)

    @device_function
    def load_listed(base, at, x, values, bits, offset, stride_c, channels_left, turns, thread):
        """Copy what the table lists."""
        row, p0 = int32(uint32(thread) // uint32(row_lanes)), int32(uint32(thread) % uint32(row_lanes))
        target, table = int32(base + at), int32(base + table_at + p0 * 16)
        while row < depth:
            from_row = offset + row * stride_c
            exists = row < channels_left
            if not turned:
                to_x = int32(target + (row * pitch + p0 * vector) * itemsize)
                for z in range(row_copies):
                    if (z + 1) * row_lanes <= per_row or p0 < per_row - z * row_lanes:
                        low, high, size, _ = entry(table + z * (row_lanes * 16))
                        if not exists:
                            size = int32(0)
                        copy_x(to_x + z * (row_lanes * vector * itemsize), x, joined(low, high) + from_row, size)
            else:
                p = int32(p0)
                to_row = int32(at // itemsize + row * pitch + ((turns[1] if row & 1 else turns[0]) == NEXT))
                while p < per_row:  # several loads in flight hide their latency
                    for z in range(BATCH):
                        q = int32(min(p + z * row_lanes, per_row - 1))
                        low, high, size, _ = entry(base + table_at + q * 16)
                        values[z] = x[uint64(joined(low, high) + from_row)] if exists and size > 0 else 0
                    for z in range(BATCH):
                        q = int32(p + z * row_lanes)
                        if q < per_row:
                            bits[uint64(to_row + q)] = values[z]
                    p = int32(p + BATCH * row_lanes)
            row = int32(row + rows_at_once)

    @device_function
    def load(base, at, x, values, bits, channel, rows, aimed, turns, w, w_offset):
        """Start the copies of the stage from ``channel`` on, at byte ``at`` of shared memory."""
        thread = recomputed(int32(cuda.threadIdx.x))  # what depends on it shall not hold registers between the stages
        channels, group_row, _, stride_c = rows
        source, last = aimed
        load_weights(int32(base + at), thread, w, w_offset)
        if in_steps and channel <= last:
            row, p0 = place_of(thread)
            to = int32(base + at + (row * pitch + p0 * step) * itemsize)
            load_along(to, source + channel * stride_c * itemsize, stride_c, (row, p0))
        else:
            offset = group_row + channel * stride_c
            load_listed(base, at, x, values, bits, offset, stride_c, channels - channel, turns, thread)

    return aim, load


def make_window_of(config: Config):
    """A device function for the window that begins at column ``j`` of sample ``n``: the address of a thread's first
    copy at the first channel, and whether all copies follow in steps within the sample's signal.

    ``thread``: first row and first copy of each row. ``signal``: samples, length, columns, first column. ``rows``: as
    in ``make_load``.
    """
    vector, per_row, spare, turned = config.x_vector, config.copies_a_row, int(config.turned), config.turned

    @device_function
    def window_of(x, n, j, thread, signal, rows):
        batch, length, columns, first = signal
        _, group_row, stride_n, stride_c = rows
        row, p0 = thread
        i = first + j
        inside = n >= 0 and n < batch and i >= spare and i <= length - per_row * vector
        source = global_address(x, group_row + int64(n) * stride_n + int64(row) * stride_c + int64(i + p0 * vector))
        if turned:  # a thread's rows are an even number apart: all begin within a word, or none
            source = source & int64(-4)
        return source, inside and j <= columns - per_row * vector

    return window_of


def make_load_along(config: Config):
    """A device function: a thread's copies of one stage, in steps from the address ``source`` on."""
    depth, pitch, itemsize, vector = config.depth, config.pitch, config.tile.itemsize, config.x_vector
    per_row, copies, lanes, rows_at_once = config.copies_a_row, config.row_copies, config.row_lanes, config.rows_at_once
    copy = cp_async_word if config.by_words else cp_async_vector

    @device_function
    def load_along(to, source, stride_c, thread):
        row, p0 = thread
        for r in range(0, depth, rows_at_once):
            for z in range(copies):
                exists = r + rows_at_once <= depth or row < depth - r
                if exists and ((z + 1) * lanes <= per_row or p0 < per_row - z * lanes):
                    at = int32(to + (r * pitch + z * lanes * vector) * itemsize)
                    copy(at, source + (r * stride_c + z * lanes * vector) * itemsize)

    return load_along


def make_half():
    """A device function: 1 if the 16-bit element ``x[index]`` is the upper half of a word, else 0."""

    @device_function
    def half(x, index):
        return int32(global_address(x, index) >> 1 & 1)

    return half


def make_turns(config: Config):
    """A device function: OWN or NEXT (mainloop.py) for the even and the odd channels of a window, whose first tile
    begins in sample ``n``.

    Windows begin at even columns, stages at even channels. A window within a signal lies in that of sample n, because
    the zeros between samples outnumber the columns that taps reach back.
    """
    turned, half = config.turned, make_half()

    @device_function
    def turns(x, n, rows):
        even, odd = int32(OWN), int32(OWN)
        if turned:
            index = rows[1] + int64(n) * rows[2]
            even = int32(NEXT if half(x, index) else OWN)
            odd = int32(NEXT if half(x, index + rows[3]) else OWN)
        return even, odd

    return turns
