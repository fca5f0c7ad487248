"""The loading half of k5: the copies of a stage, of inputs and weights (k5_mma.py) or of a team's inputs alone
(k5_resident.py)."""

from __future__ import annotations

from numba import cuda, int32, int64, uint32, uint64

from ..ptx import (
    cp_async_commit,
    cp_async_to,
    cp_async_vector,
    device_function,
    global_address,
    ld_shared,
    recomputed,
)
from .k5_config import Config

BATCH = 8  # elements that a thread has under way where cp.async cannot copy them


def make_load(config: Config):
    """Two device functions: ``aim``, where the window's vectors lie in x, and ``load``, the copies of one stage."""
    tile, threads, depth, pitch = config.tile, config.threads, config.depth, config.pitch
    itemsize, vector, per_row = tile.itemsize, config.x_vector, config.copies_a_row
    before, advance, shift = tile.overlap + tile.lead, tile.advance, tile.chunk_shift
    x_stage, w_stage = config.x_stage, config.w_stage
    row_lanes = max(1, threads // depth)  # threads that copy one row of x
    rows_at_once = threads // row_lanes
    row_copies, w_copies = -(-per_row // row_lanes), -(-w_stage // (16 * threads))
    by_copy = vector * itemsize >= 4
    table_at, entry = config.table, ld_shared(4, int32)
    copy_x, copy_w = cp_async_to(max(4, vector * itemsize)), cp_async_to(16)

    @device_function
    def joined(low, high):
        return int64(high) << 32 | int64(uint32(low))

    @device_function
    def aim(table, column_tile, chunk, batch, length, columns, first, stride_n, stride_l):
        """Where each vector of the window lies in x, at channel 0, and how many bytes of it are in the signal."""
        n, j = divmod(column_tile * advance - before - chunk * shift, columns)
        p = int32(cuda.threadIdx.x)
        while p < per_row:
            m, c = n, j + p * vector
            while c >= columns:
                m, c = m + 1, c - columns
            i = first + c
            inside = m >= 0 and m < batch and i >= 0 and i < length
            at = m * stride_n + i * stride_l if inside else int64(0)
            entry = int32(table_at // 4 + 4 * p)
            table[uint64(entry)], table[uint64(entry + 1)] = int32(at & 0xFFFFFFFF), int32(at >> 32)
            table[uint64(entry + 2)] = int32(min(int64(vector), length - i) * itemsize) if inside else int32(0)
            p = int32(p + threads)

    @device_function
    def load(base, at, x, values, bits, offset, stride_c, channels_left, w, w_offset):
        """Start the copies of one stage, which begins at byte ``at`` of the block's shared memory."""
        thread = recomputed(int32(cuda.threadIdx.x))  # what follows from it is not worth registers between the stages
        row, p0 = int32(uint32(thread) // uint32(row_lanes)), int32(uint32(thread) % uint32(row_lanes))
        target, table = int32(base + at), int32(base + table_at + p0 * 16)
        from_w, to_w = w_offset + thread * (16 // itemsize), int32(target + x_stage + thread * 16)
        for z in range(w_copies):
            if w_stage % (16 * threads) == 0 or z < w_copies - 1 or thread < w_stage // 16 % threads:
                copy_w(to_w + z * (threads * 16), w, from_w + z * (threads * 16 // itemsize), 16)
        while row < depth:
            from_row = offset + row * stride_c
            exists = row < channels_left
            if by_copy:
                to_x = int32(target + (row * pitch + p0 * vector) * itemsize)
                for z in range(row_copies):
                    if (z + 1) * row_lanes <= per_row or p0 < per_row - z * row_lanes:
                        low, high, size, _ = entry(table + z * (row_lanes * 16))
                        if not exists:
                            size = int32(0)
                        copy_x(to_x + z * (row_lanes * vector * itemsize), x, joined(low, high) + from_row, size)
            else:
                p = int32(p0)
                while p < per_row:  # several elements at a time, for a load from memory takes long
                    for z in range(BATCH):
                        q = int32(min(p + z * row_lanes, per_row - 1))
                        low, high, size, _ = entry(base + table_at + q * 16)
                        values[z] = x[uint64(joined(low, high) + from_row)] if exists and size > 0 else 0
                    for z in range(BATCH):
                        q = int32(p + z * row_lanes)
                        if q < per_row:
                            bits[uint64(at // itemsize + row * pitch + q)] = values[z]
                    p = int32(p + BATCH * row_lanes)
            row = int32(row + rows_at_once)

    return aim, load


def make_load_ahead(config: Config):
    """Three device functions for the windows of a team of its own, in vectors of 16 bytes.

    ``aim``: the address of the thread's first vector of a window, at the first channel, and up to which channel whole
    stages begin whose vectors follow in steps within one sample's signal; -1 if there is none. ``load``: start the
    copies of the stage ``ahead``, if its tile exists, and a group of copies. ``next_stage``: the one after.

    ``ahead`` is a stage: tile, sample and column where the tile's own outputs begin, chunk of taps, channel, and what
    ``aim`` has said. ``steps``: tiles from a team's tile to its next one, the same as samples and columns, chunks of
    taps, tiles. ``signal``: samples, their length and columns, and the first of those. ``rows``: channels, index in x
    of the first one's row in the first sample, and the strides of samples and channels. ``thread``: the first row of a
    stage that the thread copies, and the first vector of each; ``to``: address of that one.
    """
    tile, depth, pitch, itemsize = config.tile, config.depth, config.pitch, config.tile.itemsize
    vector, per_row, copies = config.x_vector, config.copies_a_row, config.row_copies
    lanes, rows_at_once = config.row_lanes, config.rows_at_once
    before, shift = tile.overlap + tile.lead, tile.chunk_shift
    copy = cp_async_to(16)

    @device_function
    def begin(n, j, chunk, columns):
        """Sample and column where a window begins."""
        c = int32(j - before - chunk * shift)
        while c < 0:
            n, c = int32(n - 1), int32(c + columns)
        return n, c

    @device_function
    def aim(x, n, j, chunk, exists, thread, signal, rows):
        batch, length, columns, first = signal
        channels, group_row, stride_n, stride_c = rows
        row, p0 = thread
        n, c = begin(n, j, chunk, columns)
        i = int32(first + c)
        inside = n >= 0 and n < batch and i >= 0 and i <= length - per_row * vector
        along = exists and inside and c <= columns - per_row * vector
        source = group_row + int64(n) * stride_n + int64(row) * stride_c + int64(i + p0 * vector)
        return global_address(x, source), int32(channels - depth) if along else int32(-1)

    @device_function
    def load_along(to, source, stride_c, thread):
        row, p0 = thread
        for r in range(0, depth, rows_at_once):
            for z in range(copies):
                exists = r + rows_at_once <= depth or row < depth - r
                if exists and ((z + 1) * lanes <= per_row or p0 < per_row - z * lanes):
                    at = int32(to + (r * pitch + z * lanes * vector) * itemsize)
                    cp_async_vector(at, source + (r * stride_c + z * lanes * vector) * itemsize)

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
            size = int32(min(int32(vector), int32(length - i)) * itemsize) if inside else int32(0)
            r = int32(row)
            while r < depth:
                exists = inside and channel + r < channels
                source = group_row + int64(m) * stride_n + int64(channel + r) * stride_c + i
                at = int32(to + ((r - row) * pitch + (p - p0) * vector) * itemsize)
                copy(at, x, source if exists else int64(0), size if exists else int32(0))
                r = int32(r + rows_at_once)
            p = int32(p + lanes)

    @device_function
    def load(ahead, to, x, tiles, thread, signal, rows):
        next_tile, n, j, chunk, channel, source, last = ahead
        if channel <= last:
            load_along(to, source, rows[3], thread)
        elif next_tile < tiles:
            load_anywhere(to, x, n, j, chunk, channel, thread, signal, rows)
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
