"""Producer warps fill the ring (drawing: kernel.py)."""

from numba import cuda, int32, int64, uint32

from numba_tconv.ptx import (
    cp_async_bulk,
    device_function,
    elected,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_wait,
)

from .schedule import Schedule
from .split_ahead import make_split_stage
from .tile import PRODUCERS, Config
from .unpacked import make_bring, make_order, run_of
from .windows import Bounds, Tiles, Windows, make_windows


def make_produce(config: Config, schedule: Schedule):
    """Build ``produce``: a producer warp brings every fourth stage.

    At most one warp a slot copies: a warp two rounds ahead would mistake an older phase for its own."""
    tile, regions, resident, streamed = config.tile, config.regions, config.resident, not config.resident
    itemsize, depth, depths, stage_weights = tile.itemsize, config.depth, config.depths, config.stage_weights
    turns, locate, sample_of, walk = schedule.turns, schedule.locate, schedule.sample_of, schedule.walk
    locate_windows, copy_boxes, fill_rest = make_windows(config)
    split_ahead, split_stage, ring_at = config.split_ahead, make_split_stage(config), config.ring
    unpacked, run = config.unpacked, run_of(config)
    bring, order = (make_bring(config), make_order(config)) if unpacked else (None, None)

    @device_function
    def begin_tiles(tiles, column_tile, columns):
        for z in range(regions):
            tiles.sample[z], tiles.column[z] = sample_of(column_tile + z, columns)

    @device_function
    def produce(lane, warp, x, x_map, w, grid, in_per_group, pipe, shared, split):
        channel_stages, base = grid.channel_chunks // depths, shared.base
        columns, full, stage_bytes, stages = x.samples.columns, pipe.full, x.window.stage_bytes, pipe.stages
        sample, by_box = cuda.local.array(regions, dtype=int32), cuda.local.array(regions, dtype=int32)
        start = cuda.local.array(regions, dtype=int64)
        begins, ends = cuda.local.array(regions, dtype=int32), cuda.local.array(regions, dtype=int32)
        windows, bounds = Windows(sample, start, by_box), Bounds(begins, ends) if split_ahead else None
        weights_at = int32(regions * x.window.region)
        box_bytes, own_weights = int32(depth * x.window.pitch), int32(stage_weights if streamed else 0)
        # This loop limits the copies, so it divides nothing.
        together = int32(min(PRODUCERS, stages))
        at, barrier, ahead = int32(ring_at + warp * stage_bytes), int32(full + 8 * warp), int32(stages - warp)
        parity, to_empty, ring = int32(1), int32(pipe.empty - full), int32(stages * stage_bytes)
        tiles = Tiles(cuda.local.array(regions, dtype=int32), cuda.local.array(regions, dtype=int64))
        turn, count = int32(0), turns(grid) if warp < together else int32(0)
        row_tile, column_tile = locate(turn, grid)
        if resident:
            _, next_tile = locate(int32(turn + 1), grid)
            n_step, j_step = sample_of(next_tile - column_tile, columns)
            begin_tiles(tiles, column_tile, columns)
        stage = int32(warp)
        while turn < count:
            if not resident:
                row_tile, column_tile = locate(turn, grid)
                begin_tiles(tiles, column_tile, columns)
            channel0 = int32(int32(uint32(row_tile) // uint32(grid.group_tiles)) * in_per_group)
            weights = int64(row_tile) * (grid.tap_chunks * channel_stages) * (stage_weights // itemsize)
            if unpacked:
                group_tile = int32(uint32(row_tile) % uint32(grid.group_tiles))
                weights = (int64(channel0) * grid.group_tiles + group_tile) * run
            chunk = int32(0)
            while chunk < grid.tap_chunks:
                announced = locate_windows(windows, bounds, tiles, chunk, x, box_bytes, own_weights)
                while stage < channel_stages:
                    mbarrier_wait(barrier + to_empty, parity)
                    if elected():
                        mbarrier_expect_tx(barrier, announced)
                        row = int32(int32(channel0 + stage * depth) >> x.window.alike_log)
                        copy_boxes(windows, x, x_map, base, at, row, barrier)
                        if streamed and not unpacked:
                            cp_async_bulk(base + at + weights_at, w, weights + stage * (stage_weights // itemsize),
                                          stage_weights, barrier)  # fmt: skip
                    if unpacked:
                        cuda.syncwarp()
                        runs_at = weights + int64(stage * depth) * grid.group_tiles * run
                        bring(lane, base + at + weights_at + stage_weights, w, runs_at, grid.group_tiles, barrier)
                    fill_rest(windows, x, at, channel0, stage, in_per_group, shared, lane, barrier)
                    cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(barrier)
                    if split_ahead:
                        mbarrier_wait(barrier, parity ^ 1)
                        split_stage(lane, int32(base + at), int32(barrier - full), split, x.window, begins, ends)
                    if unpacked:
                        mbarrier_wait(barrier, parity ^ 1)
                        ordered = int32(base + at + weights_at)
                        order(lane, ordered + stage_weights, ordered, int32(split.ready + barrier - full))
                    at, barrier = int32(at + together * stage_bytes), int32(barrier + 8 * together)
                    ahead, stage = int32(ahead - together), int32(stage + together)
                    if ahead <= 0:
                        at, barrier, ahead = int32(at - ring), int32(barrier - 8 * stages), int32(ahead + stages)
                        parity = int32(parity ^ 1)
                weights += int64(channel_stages) * (stage_weights // itemsize)
                stage, chunk = int32(stage - channel_stages), int32(chunk + 1)
            turn = int32(turn + 1)
            if resident:
                for z in range(regions):
                    tiles.sample[z], tiles.column[z] = walk(tiles.sample[z], tiles.column[z], n_step, j_step, columns)

    return produce
