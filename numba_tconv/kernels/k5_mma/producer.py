"""Copies of a stage's inputs and weights.

A copy is 16 bytes where all rows of x are so aligned, else a word. A window within one signal is copied in steps,
others by a table of sources. Where 16-bit rows begin within a word, copies take a word more; mainloop.py shifts
columns."""

from typing import NamedTuple

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

from .mainloop import NEXT, OWN, Selectors
from .tile import Config

BATCH = 8  # elements in flight without cp.async


class GroupInput(NamedTuple):
    """A group's channels of x."""

    data: object
    batch: int
    length: int
    columns: int  # of a sample
    first_column: int
    channels: int
    first_row: int  # element in the first sample
    stride_n: int
    stride_c: int


class Source(NamedTuple):
    address: int  # at the first channel
    last_channel: int  # of the last stage copied in steps, or -1


class Entry(NamedTuple):
    """A copy's source in the table: the element, in two words, and bytes, 0 outside the signal."""

    low: int
    high: int
    size: int
    spare: int


class Share(NamedTuple):
    row: int
    first_copy: int


class Shared(NamedTuple):
    """Shared memory, and elements under way."""

    base: int  # address
    table: object  # as int32
    bits: object  # as elements of x
    values: object  # BATCH elements


def make_load(config: Config):
    """Build ``aim``, which lists a window's sources, for a tap chunk, and returns the thread's Source; and ``load``,
    which starts the copies to byte ``stage``, from ``channel`` and weight ``w_first`` on."""
    tile, threads, depth, pitch = config.tile, config.threads, config.depth, config.pitch
    itemsize, in_steps, per_row = tile.itemsize, config.in_steps, config.table_entries
    vector = 1 if config.shifted else config.x_vector
    before, advance, shift = tile.overlap + tile.lead, tile.advance, tile.chunk_shift
    x_stage, w_stage, table_at = config.x_stage, config.w_stage, config.table
    w_copies, copy_w = -(-w_stage // (16 * threads)), cp_async_to(16)
    window_of, load_along, load_listed = make_window_of(config), make_load_along(config), _make_load_listed(config)
    lanes, step = config.row_lanes, config.x_vector

    @device_function
    def share_of(thread):
        return Share(int32(uint32(thread) // uint32(lanes)), int32(uint32(thread) % uint32(lanes)))

    @device_function
    def aim(table, column_tile, chunk, stride_l, signal):
        n, j = divmod(column_tile * advance - before - chunk * shift, signal.columns)
        p = int32(cuda.threadIdx.x)
        address, last_channel = int64(0), int32(-1)
        if in_steps:
            address, along = window_of(n, j, share_of(p), signal)
            if along and stride_l == 1:
                last_channel = int32(signal.channels - depth)
        while p < per_row:
            sample, column = n, j + p * vector
            while column >= signal.columns:
                sample, column = sample + 1, column - signal.columns
            i = signal.first_column + column
            inside = sample >= 0 and sample < signal.batch and i >= 0 and i < signal.length
            element = sample * signal.stride_n + i * stride_l if inside else int64(0)
            entry = int32(table_at // 4 + 4 * p)
            table[uint64(entry)], table[uint64(entry + 1)] = int32(element & 0xFFFFFFFF), int32(element >> 32)
            table[uint64(entry + 2)] = int32(min(int64(vector), signal.length - i) * itemsize) if inside else int32(0)
            p = int32(p + threads)
        return Source(address, last_channel)

    @device_function
    def load_weights(to_stage, thread, w, w_first):
        from_w, to_w = w_first + thread * (16 // itemsize), int32(to_stage + x_stage + thread * 16)
        for z in range(w_copies):
            if w_stage % (16 * threads) == 0 or z < w_copies - 1 or thread < w_stage // 16 % threads:
                copy_w(to_w + z * (threads * 16), w, from_w + z * (threads * 16 // itemsize), 16)

    @device_function
    def load(shared, stage, channel, signal, source, selectors, w, w_first):
        thread = recomputed(int32(cuda.threadIdx.x))  # frees registers between stages
        load_weights(int32(shared.base + stage), thread, w, w_first)
        if in_steps and channel <= source.last_channel:
            share = share_of(thread)
            to = int32(shared.base + stage + (share.row * pitch + share.first_copy * step) * itemsize)
            load_along(to, source.address + channel * signal.stride_c * itemsize, signal.stride_c, share)
        else:
            load_listed(shared, stage, channel, signal, selectors, thread)

    return aim, load


def _make_load_listed(config: Config):
    threads, depth, pitch, itemsize = config.threads, config.depth, config.pitch, config.tile.itemsize
    shifted, per_row, table_at = config.shifted, config.table_entries, config.table
    vector = 1 if shifted else config.x_vector
    row_lanes = max(1, threads // depth)
    rows_at_once, row_copies = threads // row_lanes, -(-per_row // row_lanes)
    load_words, copy_x = ld_shared(4, int32), cp_async_to(max(4, vector * itemsize))

    @device_function
    def joined(low, high):
        return int64(high) << 32 | int64(uint32(low))

    @device_function
    def load_listed(shared, stage, channel, signal, selectors, thread):
        first_element, channels_left = signal.first_row + channel * signal.stride_c, signal.channels - channel
        row, p0 = int32(uint32(thread) // uint32(row_lanes)), int32(uint32(thread) % uint32(row_lanes))
        to_stage, table = int32(shared.base + stage), int32(shared.base + table_at + p0 * 16)
        while row < depth:
            from_row = first_element + row * signal.stride_c
            exists = row < channels_left
            if not shifted:
                to_x = int32(to_stage + (row * pitch + p0 * vector) * itemsize)
                for z in range(row_copies):
                    if (z + 1) * row_lanes <= per_row or p0 < per_row - z * row_lanes:
                        entry = Entry(*load_words(table + z * (row_lanes * 16)))
                        size = entry.size
                        if not exists:
                            size = int32(0)
                        element = joined(entry.low, entry.high) + from_row
                        copy_x(to_x + z * (row_lanes * vector * itemsize), signal.data, element, size)
            else:
                p = int32(p0)
                selector = selectors.odd if row & 1 else selectors.even
                to_row = int32(stage // itemsize + row * pitch + (selector == NEXT))
                while p < per_row:  # loads together, for latency
                    for z in range(BATCH):
                        q = int32(min(p + z * row_lanes, per_row - 1))
                        entry = Entry(*load_words(shared.base + table_at + q * 16))
                        there = exists and entry.size > 0
                        shared.values[z] = signal.data[uint64(joined(entry.low, entry.high) + from_row)] if there else 0
                    for z in range(BATCH):
                        q = int32(p + z * row_lanes)
                        if q < per_row:
                            shared.bits[uint64(to_row + q)] = shared.values[z]
                    p = int32(p + BATCH * row_lanes)
            row = int32(row + rows_at_once)

    return load_listed


def make_window_of(config: Config):
    """Build a window's address at the first channel, and whether it lies within the signal."""
    vector, per_row, spare, shifted = config.x_vector, config.copies_a_row, int(config.shifted), config.shifted

    @device_function
    def window_of(n, j, share, signal):
        i = signal.first_column + j
        inside = n >= 0 and n < signal.batch and i >= spare and i <= signal.length - per_row * vector
        of_row = signal.first_row + int64(n) * signal.stride_n + int64(share.row) * signal.stride_c
        address = global_address(signal.data, of_row + int64(i + share.first_copy * vector))
        if shifted:  # all of a thread's rows begin within words, or none
            address = address & int64(-4)
        return address, inside and j <= signal.columns - per_row * vector

    return window_of


def make_load_along(config: Config):
    """Build a thread's copies in steps from ``address``."""
    depth, pitch, itemsize, vector = config.depth, config.pitch, config.tile.itemsize, config.x_vector
    per_row, copies, lanes, rows_at_once = config.copies_a_row, config.row_copies, config.row_lanes, config.rows_at_once
    copy = cp_async_word if config.by_words else cp_async_vector

    @device_function
    def load_along(to, address, stride_c, share):
        for r in range(0, depth, rows_at_once):
            for z in range(copies):
                exists = r + rows_at_once <= depth or share.row < depth - r
                if exists and ((z + 1) * lanes <= per_row or share.first_copy < per_row - z * lanes):
                    target = int32(to + (r * pitch + z * lanes * vector) * itemsize)
                    copy(target, address + (r * stride_c + z * lanes * vector) * itemsize)

    return load_along


def make_half():
    """Build (x, index) -> 1 if ``x[index]`` is a word's upper half, else 0."""

    @device_function
    def half(x, index):
        return int32(global_address(x, index) >> 1 & 1)

    return half


def make_selectors_of(config: Config):
    """Build the Selectors of the windows of a tile that begins in sample ``n``.

    A window within a signal is of that sample: taps reach back no further than the zeros between samples."""
    shifted, half = config.shifted, make_half()

    @device_function
    def selectors_of(n, signal):
        even, odd = int32(OWN), int32(OWN)
        if shifted:
            first = signal.first_row + int64(n) * signal.stride_n
            even = int32(NEXT if half(signal.data, first) else OWN)
            odd = int32(NEXT if half(signal.data, first + signal.stride_c) else OWN)
        return Selectors(even, odd)

    return selectors_of
