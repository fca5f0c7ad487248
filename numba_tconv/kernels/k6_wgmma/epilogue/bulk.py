"""Bulk store: the copy engine writes tiles in one sample.

A run is staged with its alignment in y. Lanes write its unaligned ends; one hands the rest to the copy engine."""

from typing import NamedTuple

from numba import cuda, int32, int64

from numba_tconv.kernels.common.tensor_core.fragments import column_of
from numba_tconv.kernels.common.tensor_core.outputs import Thread
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
from .vectors import Staged, make_whole_vectors, make_write_vectors

SIZE, SOURCE, DUE = 0, 1, 2  # of Leaving.held


class Rounds(NamedTuple):
    """What the rounds of a tile share."""

    sums: object
    column: int  # address of the lane's first column
    buffers: object
    leaving: object
    out: object
    place: object
    run: int  # index in y of the tile's first own output
    pitch: int  # elements between runs
    thread: object


def make_pitch(config: Config):
    """Build ``pitch``: elements between staged runs, modulo 16 bytes as between rows of y."""
    pitch, vector = config.bulk_pitch, 16 // config.tile.out_dtype.itemsize

    @device_function
    def pitch_of(out_length):
        return int32(pitch + (int32(out_length) & (vector - 1)))

    return pitch_of


def make_hand_over(config: Config):
    """Build ``when_due``, for each pass of the mainloop, and ``at_once``: both hand a run to the copy engine.

    Leaving one by one, runs do not block loads."""
    spreads = config.spreads

    @device_function
    def at_once(leaving):
        held = leaving.held
        if held[DUE] > 0:
            held[DUE] = int32(0)
            cp_async_bulk_store(leaving.y, leaving.target[0], held[SOURCE], held[SIZE])

    @device_function
    def when_due(leaving):
        if spreads:
            held = leaving.held
            due = held[DUE] == 1
            if cuda.any_sync(0xFFFFFFFF, due):  # rarely
                cuda.syncwarp()  # keeps the copy from being predicated
                if due:
                    cp_async_bulk_store(leaving.y, leaving.target[0], held[SOURCE], held[SIZE])
            held[DUE] = int32(max(int32(held[DUE] - 1), int32(0)))

    return when_due, at_once


def make_write(config: Config):
    whole_vectors = make_whole_vectors(config)

    @device_function
    def write(leaving, staged, out, thread):
        size, source, target = whole_vectors(staged, out, thread)
        if size > 0:
            leaving.held[SIZE], leaving.held[SOURCE], leaving.target[0] = size, source, target
            leaving.held[DUE] = int32(thread.lane * leaving.interval + 1)

    return write


def make_bulk_store(config: Config):
    """Build Epilogue.store, for tiles in one sample, and ``finish``."""
    tile, exact = config.tile, config.tile.operand_halves == 2
    channels, tile_channels = config.bulk_channels, config.tile.channels
    span, itemsize, spreads = tile.span, tile.out_dtype.itemsize, config.spreads
    vector = 16 // itemsize
    rounds = tile_channels // channels
    matrices = tile.rows // 8 // rounds
    stage, write, write_vectors = make_stage(config, matrices), make_write(config), make_write_vectors(config)
    column_of_lane = device_function(column_of)
    pitch_of, (_, at_once) = make_pitch(config), make_hand_over(config)
    wait_for_all, by_lanes = cp_async_bulk_wait_read(0), config.by_lanes

    wide = tile.wide_outputs

    @device_function
    def leave(leaving):
        at_once(leaving)
        cp_async_bulk_commit()

    @device_function
    def store_round(number, tile):
        buffers, out, thread = tile.buffers, tile.out, tile.thread
        if spreads:
            leave(tile.leaving)
        if not by_lanes:
            wait_for_all()
        barrier_sync(thread.team + 1, 128)
        run = tile.run + number * (channels * out.length)
        begin = int32(int32(run + out.alignment.shift) & (vector - 1))
        moved = int32(begin * itemsize)
        biases_at = int32(buffers.shared.base + buffers.biases_at + number * (channels * 4))
        stage(int32(number * matrices), tile.sums, int32(tile.column + moved), biases_at, thread.lane,
              int32(tile.pitch * itemsize), begin)  # fmt: skip
        if not by_lanes:
            fence_async()
        barrier_sync(thread.team + 1, 128)
        shared = buffers.shared.words if wide else buffers.shared.elements
        staged = Staged(shared, buffers.shared.base, int32(buffers.at + moved), tile.pitch, run,
                        tile.place.channels_left - number * channels, tile.place.extent)  # fmt: skip
        if by_lanes:
            write_vectors(staged, out, thread)
            return
        write(tile.leaving, staged, out, thread)
        if not spreads:
            leave(tile.leaving)

    store_rounds = repeated(store_round, rounds)

    @device_function
    def store(sums, leaving, buffers, out, place, bias, thread):
        run = place.head - int64(thread.warp) * out.length
        thread = Thread(thread.team, thread.warp, recomputed(thread.lane))
        number = int32(thread.warp * 32 + thread.lane)
        if number < tile_channels:
            st_shared_f32(int32(buffers.shared.base + buffers.biases_at + number * 4), bias)
        column = column_of_lane(thread.warp, thread.lane, 0, 0)
        column = int32(buffers.shared.base + buffers.at + column * (span * itemsize))
        store_rounds(int32(0), Rounds(sums.total if exact else sums.acc, column, buffers, leaving, out, place, run,
                                    pitch_of(out.length), thread))  # fmt: skip

    @device_function
    def finish(leaving, team):
        leave(leaving)
        wait_for_all()
        barrier_sync(team + 1, 128)

    return store, finish
