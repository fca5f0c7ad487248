"""k6: Hopper's tensor cores, fed by a ring that never stops.

Idea: wgmma multiplies for four warps at once, asynchronously, its second operand straight from shared memory. So a
block divides the labour. One warpgroup only copies: input windows go into a ring of stages, guarded by mbarriers. Two
warpgroups only multiply and store. Blocks are persistent: while one tile is stored, the next ones are under way.

* Load: the copy engine takes windows inside the signal row by row, however the rows are aligned; at the ends of the
  signal cp.async copies what there is, and zeros (k6_load.py). Weights come by the copy engine in the order that wgmma
  reads: all of them once, if they fit (resident), else with every stage (streamed).
* Multiply: x is the operand in registers, since its positions are contiguous and TF32 wants channels contiguous. A lane
  owns four consecutive columns: one window serves all taps of the stage (k6_window.py).
* Store: tensor_store.py.

With resident weights the warpgroups take tiles in turn, so that the stores of one hide behind the products of the
other; with streamed weights they compute neighbouring tiles from the same stages, which halves the traffic of weights.

Expected over k5: wgmma is faster than mma.sync and needs no weights in registers; and loads, products and stores all
overlap. There is no recorded row of it yet.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache

from numba import cuda, float32, int32, int64, types, uint64

from ..elements import ELEMENTS
from ..launch import Kernel, flat
from ..problem import Problem
from ..ptx import (
    barrier_sync,
    cp_async_bulk,
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    opaque,
    recomputed,
    setmaxnreg,
    shared_address,
    take,
    wgmma,
    wgmma_commit,
    wgmma_descriptor,
    wgmma_fence,
    wgmma_wait,
)
from . import device
from .fragments import column_of
from .k6_config import BLOCKS, CONSUMERS, PRODUCERS, THREADS, Config, channel_chunks, choose
from .k6_load import make_locate, make_produce, make_window_start
from .k6_window import make_window
from .tensor_pack import packed_weights
from .tensor_rung import ALIGNED, TensorRung, layout_of
from .tensor_store import make_stage_rows, make_store
from .tensor_tile import SECTOR

BULK = 1 << 15  # bytes of one bulk copy of weights, at most


@cache
def make_kernel(config: Config) -> Kernel:
    tile, stages, resident, slot, unroll = config.tile, config.stages, config.resident, config.slot, config.unroll
    rows, parts, chunk, step = tile.rows, tile.parts, tile.tap_chunk, tile.taps.step
    halo, window, phases, channels = tile.halo, 4 + tile.halo, tile.phases, tile.channels
    advance, itemsize, lead, row_parts = tile.advance, tile.itemsize, tile.lead, tile.row_parts
    pitch, x_stage, stage_weights = config.pitch, config.x_stage, tile.stage_weights
    tap_weights, lane_channels = rows * tile.depth * itemsize, 4 // itemsize
    all_weights, ring_at, staging_at, barriers_at = config.weights, config.ring, config.staging, config.barriers
    shared_staging, staging_size, empty_slots = config.buffers == 1, tile.staging, tile.empty_slots
    all_staging = config.buffers * tile.staging
    sums, operands = rows // 2, parts * 2 * window  # registers a lane: of one block's sums, of one stage's operands
    all_sums, all_operands = BLOCKS * sums, unroll * operands
    # Tensor cores cut off what an addition cannot hold, so the error of a long sum grows with its length. Where the
    # error of fp32 is promised, short sums are added up on CUDA cores, which round.
    exact = parts == 2
    all_totals = all_sums if exact else 1
    storage = ELEMENTS[tile.dtype].storage
    multiply_all = wgmma(tile.kind, rows)
    wait_for_all, wait_for_older = wgmma_wait(0), wgmma_wait(unroll - 1)
    grow, shrink = setmaxnreg(config.registers[0], True), setmaxnreg(config.registers[1], False)
    produce, load_window = make_produce(config), make_window(config)
    turns, locate = make_locate(config)
    window_start, skipped = make_window_start(config)
    aim, aim_inside, store_inside, store_any, channels_a_warp = make_store(tile, 4)
    bias_first, reciprocal, load_type = not tile.empty_slots, tile.reciprocal, ELEMENTS[tile.dtype].load
    stage_rows = make_stage_rows(tile)
    column_of_lane, descriptor_of = (cuda.jit(device=True, inline="always")(f) for f in (column_of, wgmma_descriptor))
    # The sums leave in rounds of ``staged_rows`` rows. They are taken out of their registers in slabs, since those have
    # no run-time index (ptx.take); a slab is several rounds or a part of one.
    staged_channels, staged_rows = tile.round_channels, rows // tile.rounds
    slab = next(r for r in range(24, 0, -8) if rows % r == 0 and (r % staged_rows == 0 or staged_rows % r == 0))
    rounds_a_slab, slabs_a_round = max(1, slab // staged_rows), max(1, staged_rows // slab)
    rows_at_once = min(slab, staged_rows)
    in_slab = [4 * (r // 2) + r % 2 + b * sums + 2 * h for r in range(slab // 4) for b in (0, 1) for h in (0, 1)]
    take_slab = take(in_slab, slab // 2, rows // slab)

    @cuda.jit(device=True, inline="always")
    def multiply(acc, v, at, descriptor):
        """The products of one stage: all taps read the same window at another offset."""
        wgmma_fence()
        for b in range(chunk):
            for part in range(2 * parts - 1):  # large times large last: small products are added to small sums
                x_part = 1 if parts == 2 and part == 0 else 0
                w_part = 1 if parts == 2 and part == 1 else 0
                for block in range(BLOCKS):
                    q = at + 2 * x_part * window + halo - b * step + 2 * block
                    multiply_all(acc, block * sums, v[q], v[q + 1], v[q + window], v[q + window + 1],
                                 descriptor + (w_part * chunk + b) * (tap_weights >> 4))  # fmt: skip
        wgmma_commit()

    @cuda.jit(device=True, inline="always")
    def one_stage(acc, v, at, x_at, aligned, skip, skip_odd, descriptor0, descriptor, stage, s, parity, full, empty,
                  lane):  # fmt: skip
        """The window and the products of the stage in slot ``s``. Returns the next slot and its parity."""
        mbarrier_wait(full + 8 * s, parity)
        if not resident:
            descriptor = descriptor0 + ((ring_at + s * slot + x_stage) >> 4)
        load_window(v, at, x_at + s * slot, aligned, skip, skip_odd)
        multiply(acc, v, at, descriptor)
        if resident:
            if lane == 0:
                mbarrier_arrive(empty + 8 * s)
            wait_for_older()
        else:
            wait_for_older()  # what they read from the ring they have read by then
            if lane == 0:
                if unroll == 1:
                    mbarrier_arrive(empty + 8 * s)
                elif stage > 0:
                    mbarrier_arrive(empty + 8 * (s - 1 if s > 0 else stages - 1))
        s = int32(s + 1)
        if s == stages:
            s, parity = int32(0), int32(parity ^ 1)
        return s, parity

    def make_slab(store):
        @cuda.jit(device=True, inline="always")
        def one_slab(m, acc, total, values, heads, y, shared, base, staging, bias, has_bias, crew, warp, lane, n, j,
                     begin, n_next, begin_next, row, co, left, batch, columns, first, out_channels, out_length, padding,
                     shift):  # fmt: skip
            """Store: stage the rows from ``m`` on and write the rounds that they complete. Returns the next row."""
            lane = recomputed(lane)
            for z in range(slabs_a_round):
                if exact:
                    take_slab(values, total, m // slab)
                else:
                    take_slab(values, acc, m // slab)
                if z < slabs_a_round - 1:
                    stage_rows(values, 0, slab, shared, base, staging, z * slab, warp, lane)
                    m = int32(m + slab)
            for z in range(rounds_a_slab):
                stage_rows(
                    values, z * staged_rows, rows_at_once, shared, base, staging, (slabs_a_round - 1) * slab, warp, lane
                )
                barrier_sync(crew + 1, 128)
                done = int32(m // staged_rows * staged_channels)
                store(heads, y, shared, staging, bias, has_bias, warp, lane, n, j, begin, n_next, begin_next, row,
                      co + done, left - done, batch, columns, first, out_channels, out_length, padding,
                      shift)  # fmt: skip
                barrier_sync(crew + 1, 128)
                m = int32(m + rows_at_once)
            return m

        return one_slab

    slab_inside, slab_anywhere = make_slab(store_inside), make_slab(store_any)

    def k6_wgmma(
        x, stride_n, stride_c, stride_l, layout, x_shift, w, bias, has_bias, y, batch, length, out_length, in_per_group,
        out_per_group, groups, padding, columns, first, tap_chunks, channel_chunks, group_tiles, column_tiles, band,
        shift,
    ):  # fmt: skip
        shared = cuda.shared.array(0, dtype=float32)
        as_stored = cuda.shared.array(0, dtype=storage)
        base = shared_address(shared, 0)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(cuda.shfl_sync(0xFFFFFFFF, thread >> 5, 0))
        row_tiles, out_channels = group_tiles * groups, out_per_group * groups
        full, empty = int32(base + barriers_at), int32(base + barriers_at + 8 * stages)
        loaded, product_turn = int32(empty + 8 * stages), int32(empty + 8 * stages + 8)
        staging_turn = int32(product_turn + 8 * CONSUMERS)
        if thread == 0:
            for s in range(stages):
                mbarrier_init(full + 8 * s, PRODUCERS * 32 + 1)
                mbarrier_init(empty + 8 * s, 4 if resident else 4 * CONSUMERS)
            mbarrier_init(loaded, 1)
            for s in range(2 * CONSUMERS):
                mbarrier_init(product_turn + 8 * s, 4)
            fence_mbarrier_init()
        if empty_slots:
            e = int32(thread)
            while e < all_staging:
                shared[uint64(staging_at // 4 + e)] = float32(0)
                e = int32(e + THREADS)
        cuda.syncthreads()

        if warp >= CONSUMERS * 4:
            shrink()
            if resident and thread == CONSUMERS * 128:
                mbarrier_arrive_expect_tx(loaded, all_weights)
                at = int64(cuda.blockIdx.x) % row_tiles * (all_weights // itemsize)
                for b in range(0, all_weights, BULK):
                    cp_async_bulk(base + b, w, at + b // itemsize, min(BULK, all_weights - b), loaded)
            produce(lane, int32(warp - CONSUMERS * 4), x, stride_n, stride_c, stride_l, layout, x_shift, w, base,
                    base + ring_at, full, empty, as_stored, tap_chunks, channel_chunks, in_per_group, group_tiles,
                    row_tiles, column_tiles, band, batch, length, columns, first)  # fmt: skip
        else:
            grow()
            group_warp, crew = int32(warp & 3), int32(warp >> 2)
            other = int32(1 - crew)
            acc = cuda.local.array(all_sums, dtype=float32)
            total = cuda.local.array(all_totals, dtype=float32)
            heads = cuda.local.array(channels_a_warp, dtype=int64)
            values = cuda.local.array(slab, dtype=float32)
            v = cuda.local.array(all_operands, dtype=int32)
            # The lane's window in a stage: its first channel, its first column.
            column = column_of_lane(group_warp, lane, 0, 0)
            x_at = int32(base + ring_at + ((lane & 3) * lane_channels * pitch + lead - halo + column) * itemsize)
            if not resident:
                x_at = int32(x_at + crew * advance * itemsize)
            descriptor0 = descriptor_of(int64(base), rows * 16, 128)
            staging = int32(staging_at // 4 + (0 if shared_staging else crew * staging_size))
            if resident:
                mbarrier_wait(loaded, 0)
            per_tile = int32(tap_chunks * channel_chunks)
            chunks = int32(channel_chunks)
            s, parity, my_turn = int32(0), int32(0), int32(1 - crew)
            turn, count = int64(0), turns(row_tiles, column_tiles)
            if resident:
                turn = int64(crew)
                s = int32(crew * per_tile)
            while turn < count:
                while s >= stages:
                    s, parity = int32(s - stages), int32(parity ^ 1)
                row_tile, column_tile = locate(turn, row_tiles, column_tiles, band)
                group, group_tile = divmod(row_tile, group_tiles)
                row = int32(group_tile % row_parts * phases)
                channel = group_tile // row_parts * channels
                co = group * out_per_group + channel
                left = int32(min(int64(channels), out_per_group - channel))
                for r in range(rows // 4):
                    value = float32(0)
                    if bias_first and has_bias:
                        channel = int32(((r // 2 * 8 + (lane & 3) * 2 + r % 2) * reciprocal) >> 16)
                        value = load_type(bias[uint64(co + min(channel, left - 1))])
                    for q in range(4):
                        z = 4 * (r // 2) + r % 2 + q // 2 * sums + q % 2 * 2
                        acc[z] = opaque(float32(0) if exact else value)
                        if exact:
                            total[z] = value
                if resident:
                    mbarrier_wait(product_turn + 8 * crew, my_turn)
                descriptor = descriptor0
                stage = int32(0)
                skip, skip_odd = int32(0), int32(0)
                while stage < per_tile:
                    if layout != ALIGNED and stage % chunks == 0:
                        m, j, inside = window_start(column_tile, stage // chunks, layout, batch, length, columns, first)
                        at = m * stride_n + first + j
                        at += (row_tile // group_tiles * in_per_group + (lane & 3) * lane_channels) * stride_c
                        skip = skipped(layout, inside, x_shift, at)
                        skip_odd = skipped(layout, inside, x_shift, at + stride_c)
                    s, parity = one_stage(acc, v, 0, x_at, layout == ALIGNED, skip, skip_odd, descriptor0, descriptor,
                                          stage, s, parity, full, empty, lane)  # fmt: skip
                    descriptor += stage_weights >> 4
                    stage = int32(stage + 1)
                    if unroll > 1:
                        s, parity = one_stage(acc, v, operands, x_at, layout == ALIGNED, skip, skip_odd, descriptor0,
                                              descriptor, stage, s, parity, full, empty, lane)  # fmt: skip
                        descriptor += stage_weights >> 4
                        stage = int32(stage + 1)
                    if exact:
                        wait_for_all()
                        for z in range(all_sums):
                            total[z] += acc[z]
                            acc[z] = opaque(float32(0))
                if resident and lane == 0:
                    mbarrier_arrive(product_turn + 8 * other)
                wait_for_all()
                if not resident and unroll > 1 and lane == 0:
                    mbarrier_arrive(empty + 8 * (s - 1 if s > 0 else stages - 1))

                own_tile = column_tile if resident else column_tile + crew
                n, j = divmod(own_tile * advance, columns)
                begin, n_next, begin_next, inside = aim(n, j, batch, columns, first, out_length, padding)
                whole_tile = inside and left >= channels
                if whole_tile:
                    aim_inside(heads, n, begin, group_warp, co, out_channels, out_length)
                if shared_staging:
                    mbarrier_wait(staging_turn + 8 * crew, my_turn)
                # Two loops, so that the one that runs nearly always is short: code is fetched, too.
                m = int32(0) if whole_tile else int32(rows)  # row of the tile
                while m < rows:
                    m = slab_inside(m, acc, total, values, heads, y, shared, base, staging, bias, has_bias, crew,
                                 group_warp, lane, n, j, begin, n_next, begin_next, row, co, left, batch, columns,
                                 first, out_channels, out_length, padding, shift)  # fmt: skip
                m = int32(rows) if whole_tile else int32(0)
                while m < rows:
                    m = slab_anywhere(m, acc, total, values, heads, y, shared, base, staging, bias, has_bias, crew,
                                 group_warp, lane, n, j, begin, n_next, begin_next, row, co, left, batch, columns,
                                 first, out_channels, out_length, padding, shift)  # fmt: skip
                if shared_staging and lane == 0:
                    mbarrier_arrive(staging_turn + 8 * other)
                my_turn = int32(my_turn ^ 1)
                turn += CONSUMERS if resident else 1
                if resident:
                    s = int32(s + (CONSUMERS - 1) * per_tile)

    stored, integers = flat(storage), (types.int64,)
    signature = (stored, *integers * 5, stored, stored, *integers, stored, *integers * 15)
    return Kernel("k6_wgmma", k6_wgmma, signature, THREADS, config.shared_bytes, key=repr(config))


class WarpgroupMatrix(TensorRung):
    name = "k6_wgmma"
    exact_cc = (9, 0)
    idea = "Hopper's wgmma, fed through a ring of stages by warps that only copy; aligned runs of outputs"

    choose, make_kernel = staticmethod(choose), staticmethod(make_kernel)

    def run(self, x, w, bias, y, problem, config=None, precision=None):
        config = config or self.config(problem, x.dtype, precision)
        layout = layout_of(x, config.tile, problem.in_channels_per_group)
        kernel, chunks, blocks, sizes, tiles = _plan(problem, config, device.of(x.device.index).multiprocessors)
        packed = packed_weights(w, problem, config.tile, "wgmma", chunks)
        kernel.launch(
            blocks,
            *(
                x,
                *x.stride(),
                layout,
                x.data_ptr() % 16 // x.element_size(),
                packed,
                packed if bias is None else bias.contiguous(),
                bias is not None,
                y,
            ),
            *(*sizes, *tiles, y.data_ptr() % SECTOR // x.element_size()),
        )


@lru_cache(maxsize=1024)
def _plan(problem: Problem, config: Config, multiprocessors: int) -> tuple:
    """What a launch needs that depends on sizes alone."""
    p, tile, chunks = problem, config.tile, channel_chunks(problem, config)
    first, columns = tile.columns(p)
    group_tiles, column_tiles = tile.row_tiles(p), tile.column_tiles(p)
    blocks, band = grid(config, group_tiles * p.groups, column_tiles, multiprocessors)
    sizes = p.batch, p.length, p.out_length, p.in_channels_per_group, p.out_channels_per_group, p.groups, p.padding
    tiles = columns, first, tile.tap_chunks(p), chunks, group_tiles, column_tiles, band
    return make_kernel(config), chunks, blocks, sizes, tiles


def grid(config: Config, row_tiles: int, column_tiles: int, multiprocessors: int) -> tuple[int, int]:
    """Blocks, one a multiprocessor at most where that is possible, and the column tiles (in pairs) of a band."""
    tile = config.tile
    if config.resident:
        return row_tiles * max(1, min(multiprocessors // row_tiles, column_tiles)), 1
    # As many bytes of x as of weights for the blocks that run together.
    pairs = -(-column_tiles // CONSUMERS)
    band = round(math.sqrt(multiprocessors * tile.rows * tile.tap_chunk / (CONSUMERS * tile.advance)))
    return min(multiprocessors, pairs * row_tiles), max(1, min(band, pairs))
