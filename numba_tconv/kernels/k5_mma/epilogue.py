"""From sums through the staging buffer to y."""

from dataclasses import replace

from numba import cuda, float32, int32, int64, uint64

from numba_tconv.kernels.common.tensor_core.outputs import Output, Place, Runs, Staging
from numba_tconv.kernels.common.tensor_core.store_any import make_aim, make_store_any
from numba_tconv.kernels.common.tensor_core.store_rows import make_store_rounds
from numba_tconv.kernels.common.tensor_core.store_runs import (
    keeps_runs,
    make_load_biases,
    make_prepare,
    make_store_runs,
    runs_sizes,
)
from numba_tconv.kernels.common.tensor_core.tile import staged_at
from numba_tconv.ptx import barrier_sync, device_function, st_shared

from .tile import COLUMN_WARPS, RUN, WARP_COLUMNS, Config, run_of


def gaps_between(tile) -> bool:
    """Whether every other output is empty."""
    return tile.span == 2 and tile.phases == 1


def _make_stage_sums(config: Config):
    """Build a round's staging, and whether the buffer must begin as zeros; ``row0``: the lane's first row."""
    tile, fragments = config.tile, config.fragments
    phases, span, spread, pitch = tile.phases, tile.span, tile.spread, tile.pitch
    round_rows = tile.round_channels * phases
    skip, place = tile.skip, device_function(staged_at)
    reciprocal = tile.reciprocal
    gaps = gaps_between(tile)

    @device_function
    def stage_sums(acc, staging, row0, column0, column1, offset):
        shared, base, at = staging
        for m in range(fragments):
            for half in range(2):
                row = int32(row0 + 16 * m + 8 * half)
                if row >= 0 and row < round_rows:
                    channel = int32((row * reciprocal) >> 16)
                    run, phase = int32(at + channel * pitch), int32(row - channel * phases)
                    for e in range(2):
                        column, k = column1 if e else column0, (m * RUN * 2 + half) * 2 + e
                        if span == 1:
                            for j in range(0, RUN, 4):
                                st_shared(base + (run + column + j) * 4, acc[k + 4 * j], acc[k + 4 * j + 4],
                                          acc[k + 4 * j + 8], acc[k + 4 * j + 12])  # fmt: skip
                        elif gaps:
                            for j in range(0, RUN, 2):
                                u = int32((column + j) * 2)
                                st_shared(base + (run + int32(place(u, skip))) * 4, acc[k + 4 * j],
                                          float32(0), acc[k + 4 * j + 4], float32(0))  # fmt: skip
                        else:
                            first = int32(column * span + phase * spread + int32(offset))
                            for j in range(RUN):
                                u = int32(first + j * span)
                                shared[uint64(run + int32(place(u, skip)))] = acc[k + 4 * j]

    return stage_sums, tile.has_gaps and not gaps


@device_function
def output_of(y, weights, sizes, out_channels, alignment):
    return Output(y, weights.bias, weights.has_bias, sizes.batch, sizes.columns, sizes.first_column, out_channels,
                  sizes.out_length, sizes.padding, alignment)  # fmt: skip


def make_clear(words: int, threads: int):
    """Build ``clear``: ``threads`` threads fill the staging buffer at address ``at`` with zeros."""

    @device_function
    def clear(at, thread):
        e = int32(thread)
        while e < words // 4:
            st_shared(int32(at + e * 16), float32(0), float32(0), float32(0), float32(0))
            e = int32(e + threads)

    return clear


def make_store_tile(config: Config):
    """Build a tile's store, and whether the buffer must begin as zeros.

    A team meets at barrier ``team + 1``. ``at``: byte offset of the buffer. ``place``: without extent and head."""
    tile, warps = config.tile, config.tile_warps
    fragments, pitch, channels = config.fragments, tile.pitch, tile.channels
    rounds, round_channels, round_rows = tile.rounds, tile.round_channels, tile.round_channels * tile.phases
    itemsize, by_rows, threads = tile.itemsize, config.by_rows, 32 * warps
    aim, head_of = make_aim(tile)
    stage_sums, zeros_first = _make_stage_sums(config)
    write = _make_write(config)
    rounds_of_rows = _make_stage(config), config.staging_buffers, config.round_bytes
    store_rows = make_store_rounds(tile, warps, *rounds_of_rows) if by_rows else None
    run_of_column = device_function(run_of)

    @device_function
    def store_in_rounds(sums, row0, column0, column1, out, staging, place, thread):
        n, j, row, co, channels_left = place.sample, place.column, place.row, place.channel, place.channels_left
        round = int32(0)
        while round < rounds:
            stage_sums(sums, staging, row0, column0, column1, out.alignment.offset)
            barrier_sync(thread.team + 1, threads)
            # Only now are the sums' registers free.
            extent, straight = aim(n, j, out)
            head = head_of(n, co, extent, out, thread.warp)
            write(straight, out, staging, Place(n, j, row, co, channels_left, extent, head), thread)
            row0, co = int32(row0 - round_rows), int32(co + round_channels)
            channels_left = int32(channels_left - round_channels)
            round = int32(round + 1)
            if round < rounds:
                barrier_sync(thread.team + 1, threads)

    @device_function
    def store_tile(sums, out, shared, base, at, place, thread):
        n, j, row, co, channels_left = place.sample, place.column, place.row, place.channel, place.channels_left
        warp, lane = thread.warp, thread.lane
        warp_row, warp_column, t = int32(warp // COLUMN_WARPS), int32((warp & 1) * WARP_COLUMNS), int32(lane & 3)
        column0 = int32(warp_column + run_of_column(int32(2 * t), itemsize) * RUN)
        column1 = int32(warp_column + run_of_column(int32(2 * t + 1), itemsize) * RUN)
        in_rounds = True
        if by_rows:
            extent, straight = aim(n, j, out)
            if straight:
                of_lane = int32(base + at + (lane >> 2) * (pitch * 4))
                lane_at = int32(of_lane + column0 * 4), int32(of_lane + column1 * 4), warp_row
                head = head_of(n, co, extent, out, warp)
                place = Place(n, j, row, co, int32(min(channels_left, int32(channels))), extent, head)
                store_rows(sums, lane_at, int32(base + at), out, place, thread)
                in_rounds = False
        if in_rounds:
            row0 = int32(warp_row * (fragments * 16) + (lane >> 2))
            store_in_rounds(sums, row0, column0, column1, out, Staging(shared, base, int32(at // 4)),
                            Place(n, j, row, co, channels_left, 0, 0), thread)  # fmt: skip

    return store_tile, zeros_first


def _make_stage(config: Config):
    """Build ``stage`` for make_store_rounds; ``lane_at``: addresses of two runs, and the warp's row."""
    fragments, row_warps = config.fragments, config.row_warps

    @device_function
    def stage(k, sums, lane_at, buffer):
        run0, run1, warp_row = lane_at
        if row_warps == 1 or warp_row == k // (2 * fragments):
            first = k % (2 * fragments) // 2 * (RUN * 4) + k % 2 * 2
            for e in range(2):
                at, a = run1 if e else run0, first + e
                for z in range(0, RUN, 4):
                    st_shared(int32(at + buffer + z * 4), sums[a + 4 * z], sums[a + 4 * z + 4], sums[a + 4 * z + 8],
                              sums[a + 4 * z + 12])  # fmt: skip

    return stage


def _make_write(config: Config):
    """Build the store of a round, a few channels at a time."""
    tile, at_once, warps = config.tile, config.channels_at_once, config.tile_warps
    some = replace(tile, round_channels=at_once)
    shared = make_prepare(some, warps), make_load_biases(some, warps)
    by_fours, by_twos, by_ones = (_make_write_runs(some, warps, quantum, *shared) for quantum in (4, 2, 1))
    store_any, anywhere = make_store_any(some, warps), config.by_rows
    round_channels, pitch = tile.round_channels, tile.pitch
    run_loads, run_channels = runs_sizes(some, warps)

    @device_function
    def write(straight, out, staging, place, thread):
        n, j, row, co, channels_left = place.sample, place.column, place.row, place.channel, place.channels_left
        extent, head = place.extent, place.head
        runs = Runs(
            cuda.local.array(run_channels, dtype=int64),
            cuda.local.array(run_loads, dtype=int32),
            cuda.local.array(run_channels, dtype=int32),
            cuda.local.array(run_channels, dtype=int32),
        )
        done = int32(0)
        while done < round_channels:
            some, left = Staging(staging.shared, staging.base, int32(staging.at + done * pitch)), channels_left - done
            if anywhere or not straight:
                store_any(runs, out, some, Place(n, j, row, co + done, left, extent, head), thread)
            elif out.alignment.quantum == 4:
                by_fours(runs, out, some, Place(n, j, row, co + done, left, extent, head), thread)
            elif out.alignment.quantum == 2:
                by_twos(runs, out, some, Place(n, j, row, co + done, left, extent, head), thread)
            else:
                by_ones(runs, out, some, Place(n, j, row, co + done, left, extent, head), thread)
            head += at_once * out.length
            done = int32(done + at_once)

    return write


def _make_write_runs(tile, warps: int, quantum: int, prepare, load_biases):
    kept = keeps_runs(tile, warps)
    store_runs = make_store_runs(tile, warps, quantum, prepare, load_biases)

    @device_function
    def write_runs(runs, out, staging, place, thread):
        if kept:
            prepare(runs, int32(0), out, staging, place, thread)
        store_runs(runs, out, staging, place, thread)

    return write_runs
