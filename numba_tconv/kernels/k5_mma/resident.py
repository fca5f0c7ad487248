"""k5 with resident weights: the weights of all stages are loaded once into shared memory, and only x streams.

A block is ``teams`` of warps, each with tiles and a ring of its own. The stores of one team hide behind the products of
another, and the first stages of a team's next tile are copied while it stores.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, float32, int32, int64, types, uint32, uint64

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
    st_shared,
)
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, flat

from .epilogue import make_store_tile
from .load_ahead import make_load_ahead
from .mainloop import make_products, make_start, make_window
from .producer import make_turns
from .tile import COLUMN_WARPS, RUN, WARP_COLUMNS, Config, run_of


@cache
def make_kernel(config: Config) -> Kernel:
    tile, stages, chunks, teams = config.tile, config.stages, config.chunks, config.teams
    itemsize, pitch, advance = tile.itemsize, config.pitch, tile.advance
    threads, team_threads, tile_warps = config.threads, config.threads // teams, config.tile_warps
    all_weights, slot, w_stage = config.resident_weights, config.x_stage, config.w_stage
    team_bytes, staging_at, staging = config.team_bytes, stages * config.x_stage, tile.staging
    fragments, phases, channels, row_parts = config.fragments, tile.phases, tile.channels, tile.row_parts
    pair, lead, halo = 4 // itemsize, tile.lead, config.halo
    chunk_bytes, stage_weights = tile.depth * pitch * itemsize, tile.depth_weights
    sums, operands, exact = fragments * RUN * 4, 2 * tile.parts * config.window, tile.parts == 2
    totals, lane_rows = sums if exact else 1, 2 * fragments
    aim, load, next_stage = make_load_ahead(config)
    turns_of = make_turns(config)
    load_window, products = make_window(config), make_products(config)
    load_biases, start = make_start(config)
    store_tile, zeros_first = make_store_tile(config)
    await_copies = cp_async_wait(stages - 2)
    row_lanes, vector = config.row_lanes, config.x_vector
    storage, bits_type = ELEMENTS[tile.dtype].storage, float32 if itemsize == 4 else types.uint16
    run_of_column = device_function(run_of)

    def k5_mma(
        x, stride_n, stride_c, w, bias, has_bias, y, batch, length, out_length, in_per_group, out_per_group, groups,
        padding, columns, first, tap_chunks, stages_a_chunk, group_tiles, column_tiles, alignment,
    ):  # fmt: skip
        shared = cuda.shared.array(0, dtype=float32)
        base = shared_address(shared, 0)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(cuda.shfl_sync(0xFFFFFFFF, thread >> 5, 0))
        team, team_warp = int32(uint32(warp) // uint32(tile_warps)), int32(uint32(warp) % uint32(tile_warps))
        team_thread, team_at = int32(team_warp * 32 + lane), int32(all_weights + team * team_bytes)
        warp_row, warp_column = int32(team_warp // COLUMN_WARPS), int32((team_warp & 1) * WARP_COLUMNS)
        # Row tiles are neighbours in the grid, because they read the same inputs.
        block = int32(cuda.blockIdx.x)
        group = int32(block // int32(group_tiles))
        group_tile = int32(block - group * int32(group_tiles))
        first_row = int32(group_tile % row_parts * phases)
        first_channel = int32(group_tile // row_parts * channels)
        steps, out_channels = int32(tap_chunks * stages_a_chunk), out_per_group * groups

        griddepcontrol_wait()  # for the packed weights
        e, weights = int32(thread * 16), global_address(w, int64(block) * steps * (w_stage // itemsize))
        while e < all_weights:
            cp_async_vector(base + e, weights + e)
            e = int32(e + threads * 16)
        cp_async_commit()
        scales = scales_of(w[uint64(w.shape[0] - 1)]) if exact else (int32(0), int32(0))

        column = lead - halo + warp_column + run_of_column(lane >> 2, itemsize) * RUN
        # Opaque, else each stage would compute them anew.
        x_at = recomputed(int32(base + team_at + ((lane & 3) * pair * pitch + column) * itemsize))
        w_at = recomputed(int32(base + warp_row * (fragments * 512) + lane * 16))
        acc = cuda.local.array(sums, dtype=float32)
        total = cuda.local.array(totals, dtype=float32)
        v = cuda.local.array(operands, dtype=int32)
        biases = cuda.local.array(lane_rows, dtype=float32)
        for z in range(sums):
            acc[z] = float32(0)
        row0 = int32(warp_row * (fragments * 16) + (lane >> 2))
        co, channels_left = int32(group * out_per_group + first_channel), int32(out_per_group - first_channel)
        load_biases(biases, bias, has_bias, row0, co, channels_left)
        if zeros_first:
            e = int32(team_thread)
            while e < staging // 4:
                st_shared(int32(base + team_at + staging_at + e * 16), float32(0), float32(0), float32(0), float32(0))
                e = int32(e + team_threads)

        # The loads run stages - 1 ahead of the products, into the next tile.
        stride, tile_now = int32(cuda.gridDim.y * teams), int32(cuda.blockIdx.y * teams + team)
        n_step, j_step = divmod(int64(stride) * advance, columns)
        n, j = divmod(int64(tile_now) * advance, columns)
        n, j, tiles, a_sample = int32(n), int32(j), int32(column_tiles), int32(columns)
        to_next = stride, int32(n_step), int32(j_step), int32(tap_chunks), tiles
        signal = int32(batch), int32(length), a_sample, int32(first)
        rows = int32(in_per_group), group * in_per_group * stride_c, stride_n, stride_c
        copied = int32(uint32(team_thread) // uint32(row_lanes)), int32(team_thread & (row_lanes - 1))
        to = recomputed(int32(base + team_at + (copied[0] * pitch + copied[1] * vector) * itemsize))
        source, last = aim(x, n, j, int32(0), tile_now < tiles, copied, signal, rows)
        ahead = tile_now, n, j, int32(0), int32(0), source, last
        for q in range(stages - 1):
            load(ahead, int32(to + q * slot), x, tiles, copied, signal, rows)
            ahead = next_stage(ahead, x, to_next, copied, signal, rows)
        await_copies()
        cuda.syncthreads()  # all threads' copies of the weights have landed

        at = int32(0)
        while tile_now < tiles:
            start(total if exact else acc, biases)
            w_now, s, turns = int32(w_at), int32(0), turns_of(x, n, rows)
            while s < steps:
                await_copies()
                barrier_sync(team + 1, team_threads)  # the stage has landed, and the team has left the one loaded next
                x_now, at_load = int32(x_at + at), int32(at - slot if at > 0 else (stages - 1) * slot)
                inverse = load_window(v, x_now, turns, scales)
                load(ahead, int32(to + at_load), x, tiles, copied, signal, rows)
                products(acc, v, w_now)
                for c in range(1, chunks):
                    load_window(v, x_now + c * chunk_bytes, turns, scales)
                    products(acc, v, w_now + c * stage_weights)
                if exact:
                    for z in range(sums):
                        total[z] += acc[z] * inverse
                        acc[z] = float32(0)
                # After the copies have read their addresses from the registers.
                ahead = next_stage(ahead, x, to_next, copied, signal, rows)
                w_now, s = int32(w_now + w_stage), int32(s + 1)
                at = int32(at + slot if at < (stages - 1) * slot else 0)

            store_tile(total if exact else acc, y, shared, base, int32(team_at + staging_at), bias, has_bias, team,
                       team_warp, lane, int64(n), int64(j), first_row, co, channels_left, batch, columns, first,
                       out_channels, out_length, padding, alignment)  # fmt: skip
            tile_now, n, j = int32(tile_now + stride), int32(n + to_next[1]), int32(j + to_next[2])
            if j >= a_sample:
                n, j = int32(n + 1), int32(j - a_sample)

    bits_array, stored, integers = flat(bits_type), flat(storage), (types.int64,)
    signature = (bits_array, *integers * 2, bits_array, stored, *integers, stored, *integers * 13)
    signature += (types.UniTuple(types.int64, 4),)
    return Kernel("k5_mma", k5_mma, signature, threads, config.shared_bytes, config.min_blocks, key=repr(config))
