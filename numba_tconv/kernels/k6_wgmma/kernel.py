"""k6: a warp-specialised, persistent wgmma kernel.

Idea: producer warps copy, two consumer warpgroups multiply and store, and all of it overlaps.

    x, w --TMA--> ring of stages in shared memory --window--> registers --wgmma--> sums --staging--> y
          producers (4 warps)                      consumers (2 x 128 threads)

* Load (producer.py, boxes.py): the copy engine fetches a window in one box and rounds it to TF32; windows shared by
  samples are filled row by row. Weights arrive in wgmma's order, once if they fit (resident), else with every stage
  (streamed).
* Begin: blocks start while the weights are being packed, and wait before they copy.
* Multiply (mainloop.py, window.py, view.py): x is the register operand, because TF32 wgmma takes shared operands only
  with contiguous channels. A lane owns four consecutive columns, so one window serves all taps of a stage.
* Input (input.py): inputs without a tensor map, and some short samples, are copied first.
* Store (epilogue/): staged sums leave as aligned runs, by the copy engine during the next tile or by the warps. Parts
  of a long stride's phases go straight to memory.
* Tail (tail.py): another kernel computes a lone last column of every sample.
* Split-K (split.py): few tiles with long sums deal the input channels out to parts.

With resident weights the warpgroups take alternate tiles, so one stores while the other multiplies. With streamed
weights or split operands (tf32x3) both compute neighbouring tiles from the same stages, which halves the traffic of
weights. A cost model chooses height, mode and store (cost.py).

Latency limits the mainloop: it does not divide, and a lane knows how to load its window before it waits for the stage.

Measured (H200, kb64, tf32): 1.28 ms, 1.5 times k5.
"""

from __future__ import annotations

from functools import cache

import torch
from numba import cuda, float32, int32, int64, types, uint32, uint64

from numba_tconv.kernels.common.packed_weights import packed_weights
from numba_tconv.kernels.common.tensor_core.fragments import column_of
from numba_tconv.kernels.common.tensor_core.rung import TensorRung
from numba_tconv.kernels.common.tensor_core.split_operand import scales_of
from numba_tconv.kernels.common.tensor_core.tile import COLUMNS, SECTOR
from numba_tconv.kernels.common.tensor_map import ALIGNMENT, MAP_BYTES, MAP_WORDS, publish
from numba_tconv.kernels.rung import taking_bias
from numba_tconv.ptx import (
    barrier_sync,
    cp_async_bulk,
    device_function,
    fence_mbarrier_init,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    opaque,
    recomputed,
    setmaxnreg,
    shared_address,
    tensormap_acquire,
    wgmma_descriptor,
    wgmma_wait,
)
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, flat
from numba_tconv.runtime.layout import room

from .boxes import place
from .epilogue import make_epilogue, make_extra_of, runs_of, slab_of
from .mainloop import make_stages
from .plan import plan_of
from .producer import make_follow, make_locate, make_produce
from .split import choose, cost
from .tile import BLOCKS, CONSUMERS, PRODUCERS, REGISTERS, THREADS, Config, configs
from .view import make_view
from .window import lane_rows_of

BULK = 1 << 15  # bytes of one bulk copy of weights, at most
# k5 is faster for tiles with both fewer rows and fewer stages.
FEWEST_ROWS, FEWEST_TURNS = 64, 3


@cache
def make_kernel(config: Config) -> Kernel:
    tile, most_stages, resident, paired = config.tile, config.stages, config.resident, config.paired
    unroll, depths = config.unroll, config.depths
    rows, parts, depth = tile.rows, tile.parts, tile.depth
    halo, window, phases, channels, all_taps = tile.halo, 4 + tile.halo, tile.phases, tile.channels, tile.tap_chunk
    itemsize, lead, row_parts = tile.itemsize, tile.lead, tile.row_parts
    regions, map_at, ready_at = config.regions, config.map, config.ready
    lane_channels, lane_rows = 4 // itemsize, lane_rows_of(tile)
    all_weights, ring_at, staging_at, barriers_at = config.weights, config.ring, config.staging, config.barriers
    empty_slots, all_staging = tile.empty_slots, config.staging_bytes // 4
    own_staging, extras_at, own_extras = config.own_staging, config.extras_at, config.extras
    sums, operands = rows // 2, parts * 2 * window  # registers a lane: one block's sums, one depth's operands
    all_sums, all_operands = BLOCKS * sums, unroll * operands
    ahead = config.split_ahead
    exact = parts == 2  # the sums are added up on CUDA cores (mainloop.py)
    all_totals = all_sums if exact else 1
    storage, out_storage = ELEMENTS[tile.dtype].storage, ELEMENTS[tile.out_dtype].storage
    wait_for_all = wgmma_wait(0)
    grow, shrink = setmaxnreg(REGISTERS[0], True), setmaxnreg(REGISTERS[1], False)
    produce, stages_of, view_of = make_produce(config), make_stages(config), make_view(config)
    turns, _ = make_locate(config)
    turns_on = 1 if paired else CONSUMERS  # from a turn of a warpgroup to its next
    first_tile, tile_after = make_follow(config, turns_on)
    # With resident weights a block keeps its row tile. Locating the next tile before the store pays only with one phase
    # and no split operands.
    keeps_rows, looks_ahead = resident and not exact, not exact and phases == 1
    aim_tile, store_tile, finish = make_epilogue(config)
    # A warp's runs leave during three quarters of the next tile's turns.
    steps_for_runs = 4 * unroll * -(-channels // 4)
    extra_of, slab, (run_loads, run_channels) = make_extra_of(config), slab_of(config), runs_of(config)
    column_of_lane, descriptor_of = (device_function(f) for f in (column_of, wgmma_descriptor))

    @device_function
    def rows_of(row_tile, group_tiles, out_per_group):
        """Return a tile's first row of taps, first output channel and number of existing channels."""
        group = int32(uint32(row_tile) // uint32(group_tiles))
        group_tile = int32(row_tile - group * group_tiles)
        channel = int64(group_tile // row_parts * channels)
        left = int32(min(int64(channels), out_per_group - channel))
        return int32(group_tile % row_parts * phases), group * out_per_group + channel, left

    def k6_wgmma(
        template, maps, x, x_address, stride_n, stride_c, x_early, geometry, how, loaded, w, bias, has_bias, y,
        batch, out_length, in_per_group, out_per_group, groups, padding, columns, first,
        tap_chunks, last_taps, channel_chunks, group_tiles, row_tiles, column_tiles, band, alignment,
    ):  # fmt: skip
        shared = cuda.shared.array(0, dtype=float32)
        as_stored = cuda.shared.array(0, dtype=storage)
        base = shared_address(shared, 0)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(cuda.shfl_sync(0xFFFFFFFF, thread >> 5, 0))
        out_channels = out_per_group * groups
        group_tiles, row_tiles, column_tiles, band = (
            int32(group_tiles),
            int32(row_tiles),
            int32(column_tiles),
            int32(band),
        )
        boxed, aligned, apart, in_vectors = how[0] != 0, how[1] != 0, how[2] != 0, how[3] != 0
        samples, inputs, in_columns, in_first = loaded
        alike_log, pitch, shear = int32(geometry[0]), int32(geometry[1]), int32(geometry[2])
        region, slot, stages = int32(geometry[3]), int32(geometry[4]), int32(geometry[5])
        in_stage = alike_log, pitch, shear, region, slot, stages
        full, empty = int32(base + barriers_at), int32(base + barriers_at + 8 * most_stages)
        weights_full, product_turn = int32(empty + 8 * most_stages), int32(empty + 8 * most_stages + 8)
        staging_turn = int32(product_turn + 8 * CONSUMERS)
        # Consumers wait on these mbarriers.
        ready = int32(base + ready_at) if ahead else full
        inverses = int32(ready + 8 * most_stages)
        if thread == 0:
            for s in range(most_stages):
                mbarrier_init(full + 8 * s, 1)
                mbarrier_init(empty + 8 * s, 128 * CONSUMERS if paired else 128)
                if ahead:
                    mbarrier_init(ready + 8 * s, 32)  # lanes of the splitting warp
            mbarrier_init(weights_full, 1)
            for s in range(CONSUMERS):
                mbarrier_init(product_turn + 8 * s, 4)
                mbarrier_init(staging_turn + 8 * s, 128)
            fence_mbarrier_init()
        if empty_slots:
            e = int32(thread)
            while e < all_staging:
                shared[uint64(staging_at // 4 + e)] = float32(0)
                e = int32(e + THREADS)
        cuda.syncthreads()

        if warp >= CONSUMERS * 4:
            shrink()
            maps += int64(cuda.blockIdx.x) * MAP_BYTES
            if warp == CONSUMERS * 4 and boxed:
                publish(template, x_address - x_early * itemsize, maps, base + map_at, lane)
            griddepcontrol_wait()  # until the weights are packed
            griddepcontrol_launch_dependents()
            if resident and thread == CONSUMERS * 128:
                mbarrier_arrive_expect_tx(weights_full, all_weights)
                at = int64(int32(cuda.blockIdx.x) % row_tiles) * (all_weights // itemsize)
                for b in range(0, all_weights, BULK):
                    cp_async_bulk(base + b, w, at + b // itemsize, min(BULK, all_weights - b), weights_full)
            barrier_sync(CONSUMERS + 1, PRODUCERS * 32)
            if boxed and lane == 0:
                tensormap_acquire(maps)
            scales = scales_of(w[uint64(w.shape[0] - 1)]) if ahead else (int32(0), int32(0))
            produce(lane, int32(warp - CONSUMERS * 4), x, stride_n, stride_c, maps, in_stage, x_early, boxed, aligned,
                    apart, in_vectors, w, base, full, empty, (ready, inverses, scales), as_stored, tap_chunks,
                    channel_chunks // depths, in_per_group, group_tiles, row_tiles, column_tiles, band, samples, inputs,
                    in_columns, in_first)  # fmt: skip
        else:
            grow()
            griddepcontrol_wait()
            griddepcontrol_launch_dependents()  # after the wait: it may read packed weights at once
            group_warp, crew = int32(warp & 3), int32(warp >> 2)
            other = int32(1 - crew)
            acc = cuda.local.array(all_sums, dtype=float32)
            total = cuda.local.array(all_totals, dtype=float32)
            values = cuda.local.array(slab, dtype=float32)
            held, goes = cuda.local.array(3, dtype=int32), cuda.local.array(1, dtype=int64)
            for z in range(3):
                held[z] = int32(0)
            goes[0] = int64(0)
            v = cuda.local.array(all_operands, dtype=int32)
            runs = (
                cuda.local.array(run_channels, dtype=int64),
                cuda.local.array(run_loads, dtype=int32),
                cuda.local.array(run_channels, dtype=int32),
                cuda.local.array(run_channels, dtype=int32),
            )
            # Address of the lane's window in the first slot.
            column = column_of_lane(group_warp, lane, 0, 0)
            x_at = int32(base + ring_at + (lead - halo + column) * itemsize)
            lane_channel = int32((lane & 3) * lane_channels)
            x_at = int32(x_at + place(lane_channel, alike_log, pitch, shear))
            h_step, odd_step = int32(depth // lane_rows * pitch), int32(pitch + shear)
            if paired:
                x_at = int32(x_at + crew * region)
            weights_at = int32(0 if resident else ring_at + regions * region)
            # Opaque, else the compiler recomputes it for each stage.
            descriptor0 = recomputed(int32(descriptor_of(base + weights_at, rows * 16, 0)))
            staging, extras = int32(staging_at + crew * own_staging), int32(extras_at + crew * own_extras)
            if resident:
                mbarrier_wait(weights_full, 0)
            for z in range(all_sums):
                acc[z] = opaque(float32(0))
            ring = slot, stages
            scales = scales_of(w[uint64(w.shape[0] - 1)]) if exact else (int32(0), int32(0))
            if ahead:
                scales = int32(inverses + 4 * crew), int32(0)
            tap_chunks, channel_chunks = int32(tap_chunks), int32(channel_chunks)
            per_tile = int32(tap_chunks * channel_chunks)
            interval = int32(max(int32(int32(per_tile * 3) // steps_for_runs), int32(1)))
            per_tile = int32(per_tile // depths)
            s, parity, my_turn = int32(0), int32(0), int32(1 - crew)
            turn, count = int32(0), turns(row_tiles, column_tiles)
            if not paired:
                turn = int32(crew)
                s = int32(crew * per_tile)
            own = crew if paired else int32(0)  # the warpgroup's tile in a pair
            tiles = row_tiles, column_tiles, band, own, in_columns
            row_tile, n, j, steps = first_tile(turn, tiles)
            if keeps_rows:
                row, co, left = rows_of(row_tile, group_tiles, out_per_group)
            taken = boxed, aligned, apart, x_early, stride_c, (inputs, in_columns, in_first), column, x_at
            # ``known``: ``view`` already holds for the next tile's first tap chunk.
            view, known = (x_at, False, (False, int32(0)), int32(4)), False
            while turn < count:
                while s >= stages:
                    s, parity = int32(s - stages), int32(parity ^ 1)
                if not keeps_rows and not exact:
                    row, co, left = rows_of(row_tile, group_tiles, out_per_group)
                if exact:
                    for z in range(all_sums):
                        total[z] = float32(0)
                descriptor, add = descriptor0, int32(0)
                tap_chunk = int32(0)
                while tap_chunk < tap_chunks:
                    if not known:
                        view = view_of(n, j, tap_chunk, taken)
                    x_row, rounded, beyond, together = view
                    known = False
                    taps = int32(last_taps if tap_chunk == tap_chunks - 1 else all_taps)
                    s, parity, descriptor = stages_of(acc, total, held, goes, y, v, x_row, h_step, odd_step, beyond,
                                                      together, rounded, scales, ring, descriptor0, descriptor, add,
                                                      taps, s, parity, ready, empty, channel_chunks,
                                                      product_turn + 8 * crew, my_turn)  # fmt: skip
                    add = int32(1)
                    tap_chunk = int32(tap_chunk + 1)
                if not paired and lane == 0:
                    mbarrier_arrive(product_turn + 8 * other)
                if exact:
                    row, co, left = rows_of(row_tile, group_tiles, out_per_group)
                extra = extra_of(bias, has_bias, co, left, int32(thread & 127))
                aimed = aim_tile(group_warp, n, j, co, batch, columns, first, out_channels, out_length, padding,
                                 alignment)  # fmt: skip
                turn = int32(turn + turns_on)
                next_n, next_j = n, j
                if looks_ahead and turn < count:
                    row_tile, next_n, next_j = tile_after(turn, row_tile, n, j, steps, tiles)
                    view, known = view_of(next_n, next_j, int32(0), taken), True
                wait_for_all()
                if not resident and unroll > 1:
                    mbarrier_arrive(empty + 8 * (s - 1 if s > 0 else stages - 1))

                store_tile(acc, total, values, runs, held, goes, interval, y, shared, as_stored, base, staging, extras,
                           extra, bias, has_bias, crew, group_warp, lane, aimed, n, j, row, co, left, batch, columns,
                           first, out_channels, out_length, padding, alignment, staging_turn, my_turn)  # fmt: skip
                my_turn = int32(my_turn ^ 1)
                n, j = next_n, next_j
                if not looks_ahead and turn < count:
                    row_tile, n, j = tile_after(turn, row_tile, n, j, steps, tiles)
                if not paired:
                    s = int32(s + (CONSUMERS - 1) * per_tile)
            finish(held, goes, y, crew)

    stored, integers = flat(storage), (types.int64,)
    template = types.UniTuple(types.int64, MAP_WORDS)
    six, four = types.UniTuple(types.int64, 6), types.UniTuple(types.int64, 4)
    signature = (template, *integers, stored, *integers * 4, six, four, four, stored, stored, *integers)
    signature += (flat(out_storage), *integers * 15, four)
    return Kernel("k6_wgmma", k6_wgmma, signature, THREADS, config.shared_bytes, key=repr(config))


class WarpgroupMatrix(TensorRung):
    name = "k6_wgmma"
    exact_cc = (9, 0)
    idea = "Hopper's wgmma, fed through a ring of stages by warps that only copy; aligned runs of outputs"

    choose, make_kernel = staticmethod(choose), staticmethod(make_kernel)

    def unsuited(self, problem, dtype, precision, device):
        """Return why k5 is the better rung (small tiles with short sums), or None."""
        tile = configs(problem, precision)[0].tile  # the highest
        fewest, stages = FEWEST_ROWS // tile.parts, tile.tap_chunks(problem) * tile.channel_chunks(problem)
        if tile.rows < fewest and stages < FEWEST_TURNS:
            return (
                f"it is for tiles of at least {fewest} rows (output channels times phases), not {tile.rows}, or of "
                f"{FEWEST_TURNS} stages (input channels times taps), not {stages}"
            )
        return None

    def kernel(self, config):
        return make_kernel(config.compiled)

    def tile(self, config):
        c, tiles = config, "pairs of tiles" if config.paired else "tiles in turn"
        weights = "resident" if c.resident else "streamed"
        stores = "in bulk by the copy engine" if c.bulk_channels and not c.by_lanes else "by the warps' stores"
        joined = "; samples joined beforehand" if c.joined else ""
        tail = "; a sample's last column apart, on CUDA cores" if c.tail else ""
        parts = "" if c.splits == 1 else f"; input channels in {c.splits} parts, whose sums are added up"
        return (
            f"{tiles}, of {c.tile.rows} rows by {COLUMNS} columns; {c.stages} stages of {c.depth} input channels; "
            f"weights {weights}; outputs leave {stores}{joined}{parts}{tail}"
        )

    def predicted_ms(self, problem, config, device):
        return cost(problem, config, device)

    def prepare(self, x, w, bias, y, problem, config=None, precision=None):
        plan = plan_of(
            make_kernel,
            *(problem, config, x.dtype, precision, x.strides, x.offset % ALIGNMENT),
            *(w, bias is not None, y.offset % SECTOR, x.index),
        )
        packing, launch, tail, copy, second = plan.packing, plan.launch, plan.tail, plan.copy, plan.second
        maps_room, ordinary = room((plan.map_bytes,), torch.uint8, x.index), launch.ordinary

        def fill(x, w, bias, y):
            # The launch writes maps before the packing ends, so the packing must not read that memory.
            maps = maps_room()
            packed, now = packed_weights(w, packing)
            (launch if now else ordinary)(maps, x, x.data_ptr(), packed, bias, y)
            if tail:
                tail(x, packed, bias, y)

        def fill_from_copy(x, w, bias, y):
            fill(copy(x), w, bias, y)

        fill_whole = fill_from_copy if copy else fill
        return taking_bias(second.after(fill_whole, x.index) if second else fill_whole, bias)
