"""Consumer warpgroups go from tile to tile."""

from numba import cuda, float32, int32, int64, uint32, uint64

from numba_tconv.kernels.common.pipeline import BARRIER, FULL, Slot, release, stage_before
from numba_tconv.kernels.common.tensor_core.fragments import column_of
from numba_tconv.kernels.common.tensor_core.outputs import Runs
from numba_tconv.kernels.common.tensor_core.split_operand import scales_of
from numba_tconv.ptx import (
    device_function,
    mbarrier_arrive,
    mbarrier_wait,
    opaque,
    recomputed,
    wgmma_descriptor,
    wgmma_wait,
)

from .arguments import Buffers, Chunk, Lane, Leaving, Order, Rows, Sums, Tile, View
from .boxes import place as byte_of
from .epilogue import make_bias_of, make_epilogue, runs_of, slab_of
from .mainloop import make_mainloop
from .operands import lane_rows_of, make_view
from .schedule import Schedule, make_follow
from .tile import BLOCKS, CONSUMERS, Config


def _make_rows_of(config: Config):
    phases, channels, row_parts = config.tile.phases, config.tile.channels, config.tile.row_parts

    @device_function
    def rows_of(row_tile, group_tiles, out_per_group):
        group = int32(uint32(row_tile) // uint32(group_tiles))
        group_tile = int32(row_tile - group * group_tiles)
        channel = int64(group_tile // row_parts * channels)
        left = int32(min(int64(channels), out_per_group - channel))
        return Rows(int32(group_tile % row_parts * phases), group * out_per_group + channel, left)

    return rows_of


def _make_lane(config: Config):
    """Build ``lane_of``: a View's address, and a Lane."""
    tile, regions, resident, paired, ring_at = config.tile, config.regions, config.resident, config.paired, config.ring
    itemsize, rows, exact = tile.itemsize, tile.rows, tile.operand_halves == 2
    before, channels, row_step = tile.lead - tile.halo, 4 // itemsize, tile.depth // lane_rows_of(tile)
    descriptor_of = device_function(wgmma_descriptor)

    @device_function
    def lane_of(me, column, window, packed, base, inverses):
        at = int32(base + ring_at + (before + column) * itemsize)
        channel = int32((me.lane & 3) * channels)
        at = int32(at + byte_of(channel, window.alike_log, window.pitch, window.shear))
        h_step, odd_step = int32(row_step * window.pitch), int32(window.pitch + window.shear)
        if paired:
            at = int32(at + me.team * window.region)
        weights_at = int32(0 if resident else ring_at + regions * window.region)
        # Opaque: else recomputed for each stage.
        descriptor = recomputed(int32(descriptor_of(base + weights_at, rows * 16, 0)))
        scales = scales_of(packed[uint64(packed.shape[0] - 1)]) if exact else (int32(0), int32(0))
        return at, Lane(h_step, odd_step, window.stage_bytes, descriptor, scales, int32(inverses + 4 * me.team))

    return lane_of


def make_consume(config: Config, schedule: Schedule):
    tile, resident, paired, unroll = config.tile, config.resident, config.paired, config.unroll
    depths, channels, all_taps, exact = config.depths, tile.channels, tile.tap_chunk, tile.operand_halves == 2
    all_sums, all_operands = BLOCKS * tile.rows // 2, unroll * tile.operand_halves * 2 * (4 + tile.halo)
    all_totals, wait_for_all = all_sums if exact else 1, wgmma_wait(0)
    staging_at, own_staging, biases_at, own_biases = (
        config.staging,
        config.own_staging,
        config.biases_at,
        config.bias_bytes,
    )
    mainloop, view_of, turns = make_mainloop(config), make_view(config), schedule.turns
    turns_on = 1 if paired else CONSUMERS
    first_tile, tile_after = make_follow(config, schedule, turns_on)
    # Locating the next tile early pays only with one phase.
    keeps_rows, looks_ahead = resident and not exact, not exact and tile.phases == 1
    aim_tile, store_tile, finish = make_epilogue(config)
    # Runs leave during three quarters of the next tile.
    steps_for_runs = 4 * unroll * -(-channels // 4)
    bias_of, slab, (run_loads, run_channels) = make_bias_of(config), slab_of(config), runs_of(config)
    rows_of, lane_of, column_of_lane = _make_rows_of(config), _make_lane(config), device_function(column_of)

    @device_function
    def consume(me, x, packed, out, grid, out_per_group, shared, barriers):
        other, ready = int32(1 - me.team), barriers.ready
        acc = cuda.local.array(all_sums, dtype=float32)
        total = cuda.local.array(all_totals, dtype=float32)
        values = cuda.local.array(slab, dtype=float32)
        held, target = cuda.local.array(3, dtype=int32), cuda.local.array(1, dtype=int64)
        for z in range(3):
            held[z] = int32(0)
        target[0] = int64(0)
        v = cuda.local.array(all_operands, dtype=int32)
        targets, sources = cuda.local.array(run_channels, dtype=int64), cuda.local.array(run_loads, dtype=int32)
        done, sizes = cuda.local.array(run_channels, dtype=int32), cuda.local.array(run_channels, dtype=int32)
        runs = Runs(targets, sources, done, sizes)
        column = column_of_lane(me.warp, me.lane, 0, 0)
        x_at, lane = lane_of(me, column, x.window, packed, shared.base, barriers.inverses)
        if resident:
            mbarrier_wait(barriers.weights, 0)
        for z in range(all_sums):
            acc[z] = opaque(float32(0))
        tap_chunks, channel_chunks = int32(grid.tap_chunks), int32(grid.channel_chunks)
        per_tile = int32(tap_chunks * channel_chunks)
        interval = int32(max(int32(int32(per_tile * 3) // steps_for_runs), int32(1)))
        per_tile = int32(per_tile // depths)
        sums, leaving = Sums(acc, total, values, runs), Leaving(held, target, interval, out.data)
        staging, biases = int32(staging_at + me.team * own_staging), int32(biases_at + me.team * own_biases)
        stage, parity, order_parity = int32(0), int32(FULL), other
        turn, count = int32(0), turns(grid)
        if not paired:
            turn = me.team
            stage = int32(me.team * per_tile)
        own, in_columns = me.team if paired else int32(0), x.samples.columns
        (row_tile, n, j), step = first_tile(turn, grid, own, in_columns)
        if keeps_rows:
            rows_now = rows_of(row_tile, grid.group_tiles, out_per_group)
        view, known = View(x_at, False, False, int32(0), int32(4)), False  # known: of the next tile
        while turn < count:
            while stage >= ready.stages:
                stage, parity = int32(stage - ready.stages), int32(parity ^ 1)
            if not keeps_rows and not exact:
                rows_now = rows_of(row_tile, grid.group_tiles, out_per_group)
            if exact:
                for z in range(all_sums):
                    total[z] = float32(0)
            descriptor, add = lane.descriptor, int32(0)
            tap_chunk = int32(0)
            while tap_chunk < tap_chunks:
                if not known:
                    view = view_of(n, j, tap_chunk, x, column, x_at)
                known = False
                taps = int32(grid.last_taps if tap_chunk == tap_chunks - 1 else all_taps)
                order = Order(barriers.products + BARRIER * me.team, order_parity)
                chunk, slot = Chunk(add, taps, channel_chunks), Slot(stage, parity)
                stage, parity, descriptor = mainloop(
                    sums, v, ready, slot, view, lane, chunk, descriptor, leaving, order
                )
                add = int32(1)
                tap_chunk = int32(tap_chunk + 1)
            if not paired and me.lane == 0:
                mbarrier_arrive(barriers.products + BARRIER * other)
            if exact:
                rows_now = rows_of(row_tile, grid.group_tiles, out_per_group)
            bias = bias_of(out, rows_now.channel, rows_now.channels_left, int32(32 * me.warp + me.lane))
            place, straight = aim_tile(n, j, rows_now.first, rows_now.channel, rows_now.channels_left, out, me)
            turn = int32(turn + turns_on)
            next_n, next_j = n, j
            if looks_ahead and turn < count:
                row_tile, next_n, next_j = tile_after(turn, Tile(row_tile, n, j), step, grid, own, in_columns)
                view, known = view_of(next_n, next_j, int32(0), x, column, x_at), True
            wait_for_all()
            if not resident and unroll > 1:
                release(ready, stage_before(ready, Slot(stage, parity)))
            own_buffers = Buffers(shared, staging, biases, barriers.staging, order_parity)
            store_tile(sums, leaving, own_buffers, out, place, straight, bias, me)
            order_parity = int32(order_parity ^ 1)
            n, j = next_n, next_j
            if not looks_ahead and turn < count:
                row_tile, n, j = tile_after(turn, Tile(row_tile, n, j), step, grid, own, in_columns)
            if not paired:
                stage = int32(stage + (CONSUMERS - 1) * per_tile)
        finish(leaving, me.team)

    return consume
