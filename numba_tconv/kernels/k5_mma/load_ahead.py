"""The producer with resident weights: a team fills its ring, ahead into its next tiles."""

from typing import NamedTuple

from numba import cuda, int32, int64, uint64

from numba_tconv.ptx import cp_async_commit, cp_async_to, device_function, st_shared_u16

from .producer import Source, make_half, make_load_along, make_window_of
from .tile import Config


class Ahead(NamedTuple):
    """The stage to copy next."""

    tile: int
    sample: int  # where its own outputs begin
    column: int
    chunk: int
    channel: int
    address: int  # Source of the thread
    last_channel: int


class Schedule(NamedTuple):
    """The step to the next tile, and the ends of loops."""

    tiles: int
    samples: int
    columns: int
    tap_chunks: int
    all_tiles: int


def make_load_ahead(config: Config):
    """Build:

    * ``aim``: the Source of a window of the tile at sample ``n`` and column ``j``.
    * ``load`` starts and commits the copies of ``ahead``, the thread's first to address ``to``.
    * ``next_stage``: after ``ahead``."""
    tile, depth, itemsize = config.tile, config.depth, config.tile.itemsize
    before, shift = tile.overlap + tile.lead, tile.chunk_shift
    window_of, load_along = make_window_of(config), make_load_along(config)

    @device_function
    def begin(n, j, chunk, columns):
        c = int32(j - before - chunk * shift)
        while c < 0:
            n, c = int32(n - 1), int32(c + columns)
        return n, c

    @device_function
    def aim(n, j, chunk, exists, share, signal):
        n, c = begin(n, j, chunk, signal.columns)
        address, along = window_of(n, c, share, signal)
        return Source(address, int32(signal.channels - depth) if exists and along else int32(-1))

    load_anywhere = (_make_load_elements if config.shifted else _make_load_vectors)(config, begin)

    @device_function
    def load(ahead, to, all_tiles, share, signal):
        if ahead.channel <= ahead.last_channel:
            load_along(to, ahead.address, signal.stride_c, share)
        elif ahead.tile < all_tiles:
            load_anywhere(to, ahead, share, signal)
        cp_async_commit()

    @device_function
    def next_stage(ahead, schedule, share, signal):
        column_tile, n, j, chunk = ahead.tile, ahead.sample, ahead.column, ahead.chunk
        channel, address = int32(ahead.channel + depth), ahead.address + depth * itemsize * signal.stride_c
        last_channel = ahead.last_channel
        if channel >= signal.channels:
            channel, chunk = int32(0), int32(chunk + 1)
            if chunk == schedule.tap_chunks:
                chunk, column_tile = int32(0), int32(column_tile + schedule.tiles)
                n, j = int32(n + schedule.samples), int32(j + schedule.columns)
                if j >= signal.columns:
                    n, j = int32(n + 1), int32(j - signal.columns)
            address, last_channel = aim(n, j, chunk, column_tile < schedule.all_tiles, share, signal)
        return Ahead(column_tile, n, j, chunk, channel, address, last_channel)

    return aim, load, next_stage


def _make_load_vectors(config: Config, begin):
    """Build the copy of any window, with zeros outside the signal."""
    depth, pitch, itemsize = config.depth, config.pitch, config.tile.itemsize
    vector, per_row, lanes, rows_at_once = config.x_vector, config.copies_a_row, config.row_lanes, config.rows_at_once
    copy = cp_async_to(vector * itemsize)

    @device_function
    def load_vectors(to, ahead, share, signal):
        n, c = begin(ahead.sample, ahead.column, ahead.chunk, signal.columns)
        p = int32(share.first_copy)
        while p < per_row:
            sample, column = n, int32(c + p * vector)
            while column >= signal.columns:
                sample, column = int32(sample + 1), int32(column - signal.columns)
            i = int32(signal.first_column + column)
            inside = sample >= 0 and sample < signal.batch and i >= 0 and i < signal.length
            used = int32(min(int32(vector), int32(signal.length - i)) * itemsize) if inside else int32(0)
            r = int32(share.row)
            while r < depth:
                exists = inside and ahead.channel + r < signal.channels
                of_row = signal.first_row + int64(sample) * signal.stride_n
                source = of_row + int64(ahead.channel + r) * signal.stride_c + i
                target = int32(to + ((r - share.row) * pitch + (p - share.first_copy) * vector) * itemsize)
                copy(target, signal.data, source if exists else int64(0), used if exists else int32(0))
                r = int32(r + rows_at_once)
            p = int32(p + lanes)

    return load_vectors


def _make_load_elements(config: Config, begin):
    """As ``_make_load_vectors``, through registers, for rows that begin within words."""
    depth, pitch, width, itemsize = config.depth, config.pitch, config.width, config.tile.itemsize
    vector, lanes, rows_at_once = config.x_vector, config.row_lanes, config.rows_at_once
    half, rows_of_thread = make_half(), -(-depth // rows_at_once)

    @device_function
    def load_elements(to, ahead, share, signal):
        x, stride_c, values = signal.data, signal.stride_c, cuda.local.array(rows_of_thread, dtype=int32)
        of_row = signal.first_row + int64(ahead.sample) * signal.stride_n + int64(share.row) * stride_c
        to = int32(to + (half(x, of_row) - share.first_copy * vector) * itemsize)
        n, c = begin(ahead.sample, ahead.column, ahead.chunk, signal.columns)
        p = int32(share.first_copy)
        while p < width:
            sample, column = n, int32(c + p)
            while column >= signal.columns:
                sample, column = int32(sample + 1), int32(column - signal.columns)
            i = int32(signal.first_column + column)
            inside = sample >= 0 and sample < signal.batch and i >= 0 and i < signal.length
            of_sample = signal.first_row + int64(sample) * signal.stride_n
            source = of_sample + int64(ahead.channel + share.row) * stride_c + i
            for z in range(rows_of_thread):
                exists = inside and ahead.channel + share.row + z * rows_at_once < signal.channels
                values[z] = int32(x[uint64(source + z * rows_at_once * stride_c)]) if exists else int32(0)
            for z in range(rows_of_thread):
                if (z + 1) * rows_at_once <= depth or share.row < depth - z * rows_at_once:
                    st_shared_u16(int32(to + (z * rows_at_once * pitch + p) * itemsize), values[z])
            p = int32(p + lanes)

    return load_elements
