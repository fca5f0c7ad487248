"""Resident weights: only x streams.

Each team has own tiles and ring: one's stores hide behind another's products."""

from functools import cache

from numba import cuda, float32, int32, int64, types, uint32, uint64

from numba_tconv.kernels.common.tensor_core.outputs import Place
from numba_tconv.kernels.common.tensor_core.split_operand import scales_of
from numba_tconv.ptx import (
    barrier_sync,
    cp_async_commit,
    cp_async_vector,
    cp_async_wait,
    device_function,
    global_address,
    griddepcontrol_wait,
    recomputed,
    shared_address,
)
from numba_tconv.runtime.kernel import Kernel

from .arguments import RowTile, make_thread_of, types_of
from .epilogue import make_clear, make_store_tile, output_of
from .load_ahead import Ahead, Schedule, make_load_ahead
from .mainloop import make_products, make_start, make_window
from .producer import GroupInput, Share, make_selectors_of
from .tile import RUN, Config, run_of


def _make_load_weights(config: Config):
    """Build ``load_weights``: a block copies its weights, which begin at element ``first``, to address ``to``."""
    all_weights, threads = config.resident_weights, config.threads

    @device_function
    def load_weights(to, packed, first, thread):
        e, source = int32(thread * 16), global_address(packed, first)
        while e < all_weights:
            cp_async_vector(to + e, source + e)
            e = int32(e + threads * 16)
        cp_async_commit()

    return load_weights


def _input_of(x, sizes, columns, group):
    """The group's inputs, with 32-bit sizes."""
    batch, length, first_column = int32(sizes.batch), int32(sizes.length), int32(sizes.first_column)
    channels = int32(sizes.in_per_group)
    first_row = group * sizes.in_per_group * x.stride_c
    return GroupInput(x.data, batch, length, columns, first_column, channels, first_row, x.stride_n, x.stride_c)


@cache
def make_kernel(config: Config) -> Kernel:
    tile, stages, chunks, teams = config.tile, config.stages, config.chunks, config.teams
    itemsize, pitch, advance = tile.itemsize, config.pitch, tile.advance
    threads, team_threads = config.threads, config.threads // teams
    all_weights, slot, w_stage = config.resident_weights, config.x_stage, config.w_stage
    team_bytes, staging_at, staging = config.team_bytes, stages * config.x_stage, tile.staging
    fragments, pair, lead, halo = config.fragments, 4 // itemsize, tile.lead, config.halo
    chunk_bytes, stage_weights = tile.depth * pitch * itemsize, tile.depth_weights
    sums, operands, exact = fragments * RUN * 4, 2 * tile.operand_halves * config.window, tile.operand_halves == 2
    totals, lane_rows = sums if exact else 1, 2 * fragments
    thread_of, selectors_of = make_thread_of(config), make_selectors_of(config)
    aim, load, next_stage = make_load_ahead(config)
    load_window, products, (load_biases, start) = make_window(config), make_products(config), make_start(config)
    store_tile, zeros_first = make_store_tile(config)
    phases, channels, row_parts = tile.phases, tile.channels, tile.row_parts
    clear, load_weights = make_clear(staging, team_threads), _make_load_weights(config)
    await_copies, row_lanes, vector = cp_async_wait(stages - 2), config.row_lanes, config.x_vector
    run_of_column, input_of = device_function(run_of), device_function(_input_of)

    def k5_mma(x, weights, y, sizes, loop, column_tiles, alignment):
        shared = cuda.shared.array(0, dtype=float32)
        base = shared_address(shared, 0)
        number, block = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        me = thread_of(number)
        team_thread, team_at = int32(me.warp * 32 + me.lane), int32(all_weights + me.team * team_bytes)
        group = int32(block // int32(loop.group_tiles))
        group_tile = int32(block - group * int32(loop.group_tiles))
        first_row, first_channel = int32(group_tile % row_parts * phases), int32(group_tile // row_parts * channels)
        steps, out_channels = int32(loop.tap_chunks * loop.stages_a_chunk), sizes.out_per_group * sizes.groups

        griddepcontrol_wait()  # for packed weights
        load_weights(base, weights.packed, int64(block) * steps * (w_stage // itemsize), number)
        scales = scales_of(weights.packed[uint64(weights.packed.shape[0] - 1)]) if exact else (int32(0), int32(0))

        column = lead - halo + me.first_column + run_of_column(me.lane >> 2, itemsize) * RUN
        # Opaque: else recomputed for each stage.
        x_at = recomputed(int32(base + team_at + ((me.lane & 3) * pair * pitch + column) * itemsize))
        w_at = recomputed(int32(base + me.warp_row * (fragments * 512) + me.lane * 16))
        acc = cuda.local.array(sums, dtype=float32)
        total = cuda.local.array(totals, dtype=float32)
        v = cuda.local.array(operands, dtype=int32)
        biases = cuda.local.array(lane_rows, dtype=float32)
        for z in range(sums):
            acc[z] = float32(0)
        channel = int32(group * sizes.out_per_group + first_channel)
        row_tile = RowTile(group, first_row, channel, int32(sizes.out_per_group - first_channel))
        load_biases(biases, weights, int32(me.warp_row * (fragments * 16) + (me.lane >> 2)), row_tile)
        if zeros_first:
            clear(int32(base + team_at + staging_at), team_thread)

        step, tile_now = int32(cuda.gridDim.y * teams), int32(cuda.blockIdx.y * teams + me.team)
        n_step, j_step = divmod(int64(step) * advance, sizes.columns)
        n, j = divmod(int64(tile_now) * advance, sizes.columns)
        n, j, all_tiles, columns = int32(n), int32(j), int32(column_tiles), int32(sizes.columns)
        schedule = Schedule(step, int32(n_step), int32(j_step), int32(loop.tap_chunks), all_tiles)
        signal = input_of(x, sizes, columns, group)
        share = Share(int32(uint32(team_thread) // uint32(row_lanes)), int32(team_thread & (row_lanes - 1)))
        to = recomputed(int32(base + team_at + (share.row * pitch + share.first_copy * vector) * itemsize))
        source = aim(n, j, int32(0), tile_now < all_tiles, share, signal)
        ahead = Ahead(tile_now, n, j, int32(0), int32(0), source.address, source.last_channel)
        for q in range(stages - 1):
            load(ahead, int32(to + q * slot), all_tiles, share, signal)
            ahead = next_stage(ahead, schedule, share, signal)
        await_copies()
        cuda.syncthreads()

        stage = int32(0)
        while tile_now < all_tiles:
            start(total if exact else acc, biases)
            w_now, s, selectors = int32(w_at), int32(0), selectors_of(n, signal)
            while s < steps:
                await_copies()
                barrier_sync(me.team + 1, team_threads)  # the stage has landed; a slot is free
                x_now, to_stage = int32(x_at + stage), int32(stage - slot if stage > 0 else (stages - 1) * slot)
                inverse = load_window(v, x_now, selectors, scales)
                load(ahead, int32(to + to_stage), all_tiles, share, signal)
                products(acc, v, w_now)
                for c in range(1, chunks):
                    load_window(v, x_now + c * chunk_bytes, selectors, scales)
                    products(acc, v, w_now + c * stage_weights)
                if exact:
                    for z in range(sums):
                        total[z] += acc[z] * inverse
                        acc[z] = float32(0)
                # After the copies have read their addresses.
                ahead = next_stage(ahead, schedule, share, signal)
                w_now, s = int32(w_now + w_stage), int32(s + 1)
                stage = int32(stage + slot if stage < (stages - 1) * slot else 0)

            place = Place(int64(n), int64(j), row_tile.first_row, row_tile.first_channel, row_tile.channels_left, 0, 0)
            out = output_of(y, weights, sizes, out_channels, alignment)
            store_tile(total if exact else acc, out, shared, base, int32(team_at + staging_at), place, me)
            tile_now, n, j = int32(tile_now + step), int32(n + schedule.samples), int32(j + schedule.columns)
            if j >= signal.columns:
                n, j = int32(n + 1), int32(j - signal.columns)

    *others, alignment = types_of(config)
    signature = *others, types.int64, alignment
    return Kernel("k5_mma", k5_mma, signature, threads, config.shared_bytes, config.min_blocks, key=repr(config))
