"""Bulk store of k6: the copy engine writes tiles whose outputs all lie in one sample.

Sums are staged as they will lie in memory (staging.py), each run with the same remainder by 16 bytes as in y. Lanes
write a run's unaligned ends. One thread a channel hands the rest to the copy engine, which works during the next
products.
"""

from __future__ import annotations

from numba import cuda, int32

from numba_tconv.kernels.common.tensor_core.fragments import column_of
from numba_tconv.kernels.k6_wgmma.tile import Config
from numba_tconv.ptx import (
    barrier_sync,
    cp_async_bulk_commit,
    cp_async_bulk_store,
    cp_async_bulk_wait_read,
    device_function,
    fence_async,
    recomputed,
    repeated,
    st_shared_f32,
)

from .staging import make_stage
from .vectors import make_whole_vectors, make_write_vectors


def make_pitch(config: Config):
    """Build a device function: elements from run to run, with the same remainder by 16 bytes as a row of y.

    If the first run is aligned for the copy engine, so are all.
    """
    pitch, vector = config.bulk_pitch, 16 // config.tile.out_dtype.itemsize

    @device_function
    def pitch_of(out_length):
        return int32(pitch + (int32(out_length) & (vector - 1)))

    return pitch_of


def make_hand_over(config: Config):
    """Build ``when_due``, called once a mainloop turn, and ``at_once``, which hand a thread's run to the copy engine.

    ``held``: the run's bytes, its address, turns until it is due (0: none waits). ``goes``: its index in y. Runs that
    leave one by one do not block the next tile's loads.
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
            due = held[2] == 1
            if cuda.any_sync(0xFFFFFFFF, due):  # rarely
                cuda.syncwarp()  # keeps the compiler from predicating the branch
                if due:
                    cp_async_bulk_store(y, goes[0], held[1], held[0])
            held[2] = int32(max(int32(held[2] - 1), int32(0)))

    return when_due, at_once


def make_write(config: Config):
    """Build a device function that prepares a thread's run of the round for the copy engine."""
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
    """Build ``store``, from sums to y, and ``finish``, which waits until the engine has read the buffers."""
    tile, exact, buffers = config.tile, config.tile.parts == 2, config.buffers
    channels, tile_channels = config.bulk_channels, config.tile.channels
    span, itemsize, spreads = tile.span, tile.out_dtype.itemsize, config.spreads
    vector = 16 // itemsize
    rounds = tile_channels // channels
    matrices, buffer_bytes = tile.rows // 8 // rounds, config.buffer_bytes
    stage, write, write_vectors = make_stage(config, matrices), make_write(config), make_write_vectors(config)
    column_of_lane = device_function(column_of)
    pitch_of, (_, at_once) = make_pitch(config), make_hand_over(config)
    wait_for_buffer, wait_for_all = cp_async_bulk_wait_read(buffers - 1), cp_async_bulk_wait_read(0)
    by_lanes = config.by_lanes

    @device_function
    def leave(held, goes, y):
        at_once(held, goes, y)
        cp_async_bulk_commit()

    @device_function
    def store_round(number, state):
        acc, column, staged, leaving, crew, warp, lane, run, there, left, out_length, pitch, alignment = state
        (base, shared, at, extra_at), (held, goes, y, interval) = staged, leaving
        if spreads:
            leave(held, goes, y)
        if not by_lanes:
            wait_for_buffer()
        barrier_sync(crew + 1, 128)
        run += number * (channels * out_length)
        # Staged outputs get the remainder by 16 bytes that they have in y.
        begin = int32(int32(run + alignment[0]) & (vector - 1))
        place = int32(begin * itemsize + number % buffers * buffer_bytes)
        stage(int32(number * matrices), acc, int32(column + place), int32(base + extra_at + number * (channels * 4)),
              lane, int32(pitch * itemsize), begin)  # fmt: skip
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
        """Store a tile.

        ``at``, ``extra_at``: offsets of the warpgroup's buffers and biases, in bytes. ``extra``: bias of channel ``32 *
        warp + lane`` of the tile. ``run``: index in y of the tile's own first output. ``interval``: turns between two
        runs' departures.
        """
        lane = recomputed(lane)
        thread = int32(warp * 32 + lane)
        if thread < tile_channels:
            st_shared_f32(int32(base + extra_at + thread * 4), extra)
        column = int32(base + at + column_of_lane(warp, lane, 0, 0) * (span * itemsize))
        store_rounds(int32(0), (total if exact else acc, column, (base, shared, at, extra_at),
                                (held, goes, y, interval), crew, warp, lane, run, there, left, out_length,
                                pitch_of(out_length), alignment))  # fmt: skip

    @device_function
    def finish(held, goes, y, crew):
        leave(held, goes, y)
        wait_for_all()
        barrier_sync(crew + 1, 128)

    return store, finish
