"""Store of k6 for tiles whose outputs all lie in one sample: the copy engine takes them out of shared memory.

The sums are converted and put into the staging buffer as they will lie in memory; then a thread a channel hands the
channel's run to the copy engine, which works while the warpgroup multiplies the next tile. A run is placed so that it
begins as far from a multiple of 16 bytes as in y, whatever the length of y's rows; its ends, where the copy engine
cannot write, are written by the thread.
"""

from __future__ import annotations

import torch
from numba import cuda, float32, int32, uint32

from ..ptx import (
    barrier_sync,
    cp_async_bulk_commit,
    cp_async_bulk_store,
    cp_async_bulk_wait_read,
    device_function,
    fence_async,
    ld_shared,
    pack_bf16,
    pack_f16,
    recomputed,
    repeated,
    st_shared_f32,
    st_shared_halves,
)
from .fragments import column_of
from .k6_config import Config
from .k6_vectors import make_whole_vectors, make_write_vectors


def rotation(lane, span):
    """Which of its four columns a lane writes first, so that a warp's writes are spread over the banks; kernels call it
    too."""
    return 0 if span % 2 == 1 and span > 1 else lane & 3 if span <= 2 else lane >> 3 & 3


def make_pitch(config: Config):
    """A device function: elements from one channel's run to the next, as far from a multiple of 16 bytes as in y: then,
    if the first run is placed so that the copy engine can take it, it can take all of them."""
    pitch, vector = config.bulk_pitch, 16 // config.tile.out_dtype.itemsize

    @device_function
    def pitch_of(out_length):
        return int32(pitch + (int32(out_length) & (vector - 1)))

    return pitch_of


def make_stage(config: Config):
    """A device function (core matrix, state): put its eight rows of sums into the staging buffer.

    Two of the rows are the lane's, and of a row its four columns. ``state``: the sums; where the lane's columns go in
    the buffer, those of the round's first row; where the biases of the round's channels lie; which column comes first
    (two flags); the lane's first row of eight; the round's first core matrix; and the pitch of the runs, in bytes.
    """
    tile = config.tile
    spread, phases, itemsize, sums = tile.spread, tile.phases, tile.out_dtype.itemsize, tile.rows // 2
    span = tile.span if tile.empty_slots else 1  # then outputs that no row reaches stand behind each column's one
    aligned_rows, halves = 8 % phases == 0 or phases % 8 == 0, itemsize == 2
    narrow = pack_f16 if tile.dtype == torch.float16 else pack_bf16
    load = ld_shared(1, float32)

    @device_function
    def row_of(k, r, extra_at, pitch):
        """Bytes from the buffer's start to row ``r`` of core matrix ``k`` of the round, and its bias."""
        if aligned_rows:  # what depends on the lane, and what is known when the code is compiled
            channel, phase = int32(uint32(r) // uint32(phases)), int32(uint32(r) % uint32(phases))
            before = int32(8 * k // phases)
            return (int32(channel * pitch + (phase + 8 * k % phases) * (spread * itemsize) + before * pitch),
                    load(int32(extra_at + channel * 4 + before * 4)))  # fmt: skip
        channel = int32(uint32(8 * k + r) // uint32(phases))
        at = int32(channel * pitch + (8 * k + r - channel * phases) * (spread * itemsize))
        return at, load(int32(extra_at + channel * 4))

    @device_function
    def rotated(acc, a, odd, far, i):
        """Of the four sums of a row from ``a`` on, the one whose turn is ``i``."""
        z0, z1, z2, z3 = acc[a], acc[a + 2], acc[a + sums], acc[a + sums + 2]
        if i % 2 == 1:
            z0, z1, z2, z3 = z1, z2, z3, z0
        if i // 2 == 1:
            z0, z1, z2, z3 = z2, z3, z0, z1
        near, other = z1 if odd else z0, z3 if odd else z2
        return other if far else near

    @device_function
    def stage(k, state):
        acc, columns, extra_at, odd, far, lane_row, first, pitch = state
        even_at, even_extra = row_of(int32(k - first), lane_row, extra_at, pitch)
        odd_at, odd_extra = row_of(int32(k - first), int32(lane_row + 1), extra_at, pitch)
        for i in range(4):
            even_sum = rotated(acc, 4 * k, odd, far, i) + even_extra
            odd_sum = rotated(acc, 4 * k + 1, odd, far, i) + odd_extra
            if halves:
                st_shared_halves(int32(columns[i] + even_at), int32(columns[i] + odd_at), narrow(even_sum, odd_sum))
            else:
                st_shared_f32(int32(columns[i] + even_at), even_sum)
                st_shared_f32(int32(columns[i] + odd_at), odd_sum)
            for gap in range(itemsize, span * itemsize, itemsize):
                if halves:
                    pair = narrow(even_extra, odd_extra)
                    st_shared_halves(int32(columns[i] + even_at + gap), int32(columns[i] + odd_at + gap), pair)
                else:
                    st_shared_f32(int32(columns[i] + even_at + gap), even_extra)
                    st_shared_f32(int32(columns[i] + odd_at + gap), odd_extra)

    return stage


def make_hand_over(config: Config):
    """Two device functions that hand a thread's run to the copy engine: ``when_due``, called once a turn of the loop
    over stages, and ``at_once``.

    ``held``, ``goes``: local arrays with the run's bytes and where they are staged, the turns until it is due (0: there
    is none, or it is on its way), and where it goes (index in y). Runs that leave one after another, while the next
    tile's products run, do not keep the copies of that tile waiting in the engine's queue.
    """
    spreads = config.spreads

    @device_function
    def at_once(held, goes, y):
        if held[2] > 0:
            held[2] = int32(0)
            cp_async_bulk_store(y, goes[0], held[1], held[0])

    @device_function
    def when_due(held, goes, y):
        if spreads:
            if cuda.any_sync(0xFFFFFFFF, held[2] == 1) and held[2] == 1:  # mostly no lane's is
                cp_async_bulk_store(y, goes[0], held[1], held[0])
            held[2] = int32(max(int32(held[2] - 1), int32(0)))

    return when_due, at_once


def make_write(config: Config):
    """A device function: a thread's channel of the round gets ready to leave for y."""
    whole_vectors = make_whole_vectors(config)

    @device_function
    def write(held, goes, y, base, shared, at, warp, lane, interval, run, there, pitch, channels_left, out_length,
              alignment):  # fmt: skip
        size, source, target = whole_vectors(y, base, shared, at, warp, lane, run, there, pitch, channels_left,
                                             out_length, alignment)  # fmt: skip
        if size > 0:
            held[0], held[1], goes[0] = size, source, target
            held[2] = int32(lane * interval + 1)

    return write


def make_bulk_store(config: Config):
    """Two device functions: ``store``, a tile's sums to the staging buffers and on to y; ``finish``, which returns when
    the copy engine has left the staging buffers."""
    tile, exact, buffers = config.tile, config.tile.parts == 2, config.buffers
    channels, tile_channels = config.bulk_channels, config.tile.channels
    span, itemsize, spreads = tile.span, tile.out_dtype.itemsize, config.spreads
    vector = 16 // itemsize
    rounds = tile_channels // channels
    matrices, buffer_bytes = tile.rows // 8 // rounds, config.buffer_bytes
    stage_all, write, write_vectors = (
        repeated(make_stage(config), matrices),
        make_write(config),
        make_write_vectors(config),
    )
    column_of_lane, first_of = device_function(column_of), device_function(rotation)
    pitch_of, (_, at_once) = make_pitch(config), make_hand_over(config)
    wait_for_buffer, wait_for_all = cp_async_bulk_wait_read(buffers - 1), cp_async_bulk_wait_read(0)
    by_lanes = config.by_lanes

    @device_function
    def leave(held, goes, y):
        at_once(held, goes, y)
        cp_async_bulk_commit()

    @device_function
    def store_round(number, state):
        acc, columns, staged, leaving, flags, crew, warp, lane, run, there, left, out_length, pitch, alignment = state
        (base, shared, at, extra_at), (held, goes, y, interval) = staged, leaving
        if spreads:
            leave(held, goes, y)
        if not by_lanes:
            wait_for_buffer()
        barrier_sync(crew + 1, 128)
        run += number * (channels * out_length)
        # Moved by less than a vector, the run begins as far from a multiple of 16 bytes as in y: the tile's own first
        # output stands at such a multiple.
        place = int32(int32(int32(run + alignment[0]) & (vector - 1)) * itemsize + number % buffers * buffer_bytes)
        ways = (columns[0] + place, columns[1] + place, columns[2] + place, columns[3] + place)
        stage_all(int32(number * matrices), (acc, ways, int32(base + extra_at + number * (channels * 4)), flags[0],
                                             flags[1], int32((lane & 3) * 2), int32(number * matrices),
                                             int32(pitch * itemsize)))  # fmt: skip
        if not by_lanes:
            fence_async()
        barrier_sync(crew + 1, 128)
        if by_lanes:
            write_vectors(y, base, shared, int32(at + place), warp, lane, run, there, pitch, left - number * channels,
                          out_length, alignment)  # fmt: skip
            return
        write(held, goes, y, base, shared, int32(at + place), warp, lane, interval, run, there, pitch,
              left - number * channels, out_length, alignment)  # fmt: skip
        if not spreads:
            leave(held, goes, y)

    store_rounds = repeated(store_round, rounds)

    @device_function
    def store(acc, total, held, goes, interval, y, base, shared, at, extra_at, extra, crew, warp, lane, run, there,
              left, out_length, alignment):  # fmt: skip
        """``at``, ``extra_at``: bytes of shared memory where the warpgroup's buffers and biases lie. ``extra``: the
        bias of channel ``32 * warp + lane`` of the tile. ``run``: index in y of the tile's own first output.
        ``interval``: turns of the loop over stages from one run's departure to the next."""
        lane = recomputed(lane)
        thread = int32(warp * 32 + lane)
        if thread < tile_channels:
            st_shared_f32(int32(base + extra_at + thread * 4), extra)
        first = int32(first_of(lane, span))
        column = int32(base + at + column_of_lane(warp, lane, 0, 0) * (span * itemsize))
        columns = (
            int32(column + first * (span * itemsize)),
            int32(column + (first + 1 & 3) * (span * itemsize)),
            int32(column + (first + 2 & 3) * (span * itemsize)),
            int32(column + (first + 3 & 3) * (span * itemsize)),
        )
        store_rounds(int32(0), (total if exact else acc, columns, (base, shared, at, extra_at),
                                (held, goes, y, interval), (first & 1 == 1, first & 2 == 2), crew, warp, lane, run,
                                there, left, out_length, pitch_of(out_length), alignment))  # fmt: skip

    @device_function
    def finish(held, goes, y, crew):
        leave(held, goes, y)
        wait_for_all()
        barrier_sync(crew + 1, 128)

    return store, finish
