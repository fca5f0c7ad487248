"""k5: tensor cores, one warp at a time.

Idea: k4's matrix product with mma.sync in place of multiply-adds: one instruction of a warp multiplies 16 x 8 weights
by 8 x 8 inputs, or twice as deep with 16-bit elements. It needs nothing of Hopper: every GPU from sm_80 on has it.

* Load: cp.async fills a ring of stages (input window and weights, packed in the order of fragments); zeros stand for
  what lies outside of the signal.
* Multiply: the columns are dealt out so that a lane owns eight consecutive ones: its operands for all taps of a stage
  are one window, which it reads in 16-byte vectors. A fragment of weights is one 16-byte vector a lane.
* Store: tensor_runs.py and tensor_store.py, from a staging buffer that lies where the stages were.

Two or more blocks share a multiprocessor, so that the stores of one hide behind the products of another.

Expected over k4: tensor cores multiply several times as fast, so the memory becomes the limit; a warp of 64 x 64 sums
loads (4 + 3) vectors from shared memory for 32 products of three taps.

Measured (H200, kb64, tf32): 2.71 ms.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import torch
from numba import cuda, float32, int32, int64, types, uint32, uint64

from ..elements import ELEMENTS
from ..launch import Kernel, Prepared, alike, flat
from ..ptx import (
    cp_async_commit,
    cp_async_wait,
    device_function,
    ld_shared,
    mma,
    recomputed,
    shared_address,
    st_shared,
)
from . import device
from .k5_config import COLUMN_WARPS, RUN, WARP_COLUMNS, Config, choose, config_of, run_of
from .k5_load import BATCH, make_load, make_window
from .rung import taking_bias
from .tensor_pack import TensorPacking, packing_of
from .tensor_rung import TensorRung, by_vectors, default_precision
from .tensor_runs import keeps_runs, make_load_extra, make_prepare, make_store_runs, runs_sizes
from .tensor_store import alignment_of, make_aim, make_store_any
from .tensor_tile import COLUMNS, SECTOR, staged_at
from .weight_cache import packed_weights

GRID_AXIS = 65_535  # blocks along y or z of a grid, at most


def make_products(config: Config):
    """A device function: all products of one window; ``w_at``: the lane's first fragment of weights."""
    tile, window, halo, step = config.tile, config.window, config.halo, config.tile.taps.step
    parts, chunk, fragments = tile.parts, tile.tap_chunk, config.fragments
    tap_weights = tile.rows * tile.depth * tile.itemsize
    load_fragment, multiply = ld_shared(4, int32), mma(tile.kind)

    @cuda.jit(device=True, inline="always")
    def products(acc, v, w_at):
        a = cuda.local.array(4, dtype=int32)
        for part in range(2 * parts - 1):  # large times large last: small products are added to small sums
            x_part = 1 if parts == 2 and part == 0 else 0
            w_part = 1 if parts == 2 and part == 1 else 0
            for b in range(chunk):
                q = 2 * x_part * window + halo - b * step
                for m in range(fragments):
                    a[0], a[1], a[2], a[3] = load_fragment(w_at + (w_part * chunk + b) * tap_weights + m * 512)
                    for j in range(RUN):
                        multiply(acc, m * (RUN * 4) + 4 * j, a, 0, v[q + j], v[q + window + j])

    return products


def make_start(config: Config):
    """A device function: a lane's sums before the first product: the bias, or zeros where the store adds it."""
    fragments, add_bias = config.fragments, not config.tile.empty_slots
    reciprocal = config.tile.reciprocal
    load_type = ELEMENTS[config.tile.dtype].load

    @cuda.jit(device=True, inline="always")
    def start(sums, bias, has_bias, row0, co, channels_left):
        for m in range(fragments):
            for half in range(2):
                extra = float32(0)
                if add_bias and has_bias:
                    channel = int32(((row0 + 16 * m + 8 * half) * reciprocal) >> 16)
                    if channel < channels_left:
                        extra = float32(load_type(bias[uint64(co + channel)]))
                for j in range(RUN):
                    for e in range(2):
                        sums[(m * RUN + j) * 4 + 2 * half + e] = extra

    return start


def gaps_between(tile) -> bool:
    """One row of taps, every other output empty: a staged vector holds two outputs and the zeros behind them."""
    return tile.span == 2 and tile.phases == 1


def make_stage_sums(config: Config):
    """A device function: a warp's sums of the rows from ``row0`` on, those of this round, into the staging buffer."""
    tile, fragments = config.tile, config.fragments
    phases, span, spread, pitch = tile.phases, tile.span, tile.spread, tile.pitch
    round_rows = tile.round_channels * phases
    skip, place = tile.skip, device_function(staged_at)
    reciprocal = tile.reciprocal
    gaps = gaps_between(tile)

    @cuda.jit(device=True, inline="always")
    def stage_sums(acc, shared, base, at, row0, column0, column1, offset):
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

    return stage_sums, tile.empty_slots and not gaps


def make_write(config: Config):
    """Store: those of tensor_runs.py and tensor_store.py, called for as many channels at a time as fit in registers."""
    tile, at_once, warps = config.tile, config.channels_at_once, config.tile_warps
    some = replace(tile, round_channels=at_once)
    shared = make_prepare(some, warps), make_load_extra(some, warps)
    by_fours, by_twos, by_ones = (_make_write_runs(some, warps, quantum, *shared) for quantum in (4, 2, 1))
    store_any = make_store_any(some, warps)
    round_channels, pitch = tile.round_channels, tile.pitch
    run_loads, run_channels = runs_sizes(some, warps)

    @cuda.jit(device=True, inline="always")
    def write(head, y, shared, base, at, bias, has_bias, warp, lane, n, j, there, straight, row, co, channels_left,
              batch, columns, first, out_channels, out_length, padding, alignment):  # fmt: skip
        runs = (
            cuda.local.array(run_channels, dtype=int64),
            cuda.local.array(run_loads, dtype=int32),
            cuda.local.array(run_channels, dtype=int32),
            cuda.local.array(run_channels, dtype=int32),
        )
        done = int32(0)
        while done < round_channels:
            where, left = int32(at + done * pitch), channels_left - done
            if not straight:
                store_any(head, runs, y, shared, base, where, bias, has_bias, warp, lane, n, j, there, row, co + done,
                          left, batch, columns, first, out_channels, out_length, padding, alignment)  # fmt: skip
            elif alignment[1] == 4:
                by_fours(head, runs, y, shared, base, where, bias, has_bias, warp, lane, n, j, there, row, co + done,
                         left, batch, columns, first, out_channels, out_length, padding, alignment)  # fmt: skip
            elif alignment[1] == 2:
                by_twos(head, runs, y, shared, base, where, bias, has_bias, warp, lane, n, j, there, row, co + done,
                        left, batch, columns, first, out_channels, out_length, padding, alignment)  # fmt: skip
            else:
                by_ones(head, runs, y, shared, base, where, bias, has_bias, warp, lane, n, j, there, row, co + done,
                        left, batch, columns, first, out_channels, out_length, padding, alignment)  # fmt: skip
            head += at_once * out_length
            done = int32(done + at_once)

    return write


def _make_write_runs(tile, warps: int, quantum: int, prepare, load_extra):
    kept = keeps_runs(tile, warps)
    store_runs = make_store_runs(tile, warps, quantum, prepare, load_extra)

    @device_function
    def write_runs(head, runs, y, shared, base, at, bias, has_bias, warp, lane, n, j, there, row, co, channels_left,
                   batch, columns, first, out_channels, out_length, padding, alignment):  # fmt: skip
        if kept:
            prepare(runs, int32(0), head, there, base, at, warp, lane, int64(channels_left), out_length, alignment)
        store_runs(head, runs, y, shared, base, at, bias, has_bias, warp, lane, n, j, there, row, co, channels_left,
                   batch, columns, first, out_channels, out_length, padding, alignment)  # fmt: skip

    return write_runs


@cache
def make_kernel(config: Config) -> Kernel:
    tile, stages, threads, chunks, tiles = config.tile, config.stages, config.threads, config.chunks, config.tiles
    itemsize, depth, pitch = config.tile.itemsize, config.depth, config.pitch
    x_stage, slot, stage_weights = config.x_stage, config.x_stage + config.w_stage, tile.stage_weights
    stage_elements, lead, halo, advance = config.w_stage // itemsize, tile.lead, config.halo, tile.advance
    fragments, tile_warps, phases, channels = config.fragments, config.tile_warps, tile.phases, tile.channels
    row_parts, rounds, round_channels, staging = tile.row_parts, tile.rounds, tile.round_channels, tile.staging
    pair, round_rows = 4 // itemsize, tile.round_channels * tile.phases
    chunk_bytes = tile.depth * pitch * itemsize
    sums, operands = fragments * RUN * 4, 2 * tile.parts * config.window
    # Tensor cores cut off what an addition cannot hold, so the error of a long sum grows with its length. Where the
    # error of fp32 is promised, short sums are added up on CUDA cores, which round.
    exact, several_chunks = tile.parts == 2, tile.several_chunks
    totals = sums if exact else 1
    aim, load = make_load(config)
    load_window, products = make_window(config), make_products(config)
    start, (stage_sums, zeros_first) = make_start(config), make_stage_sums(config)
    aim_store, head_of = make_aim(tile)
    write = make_write(config)
    wait_for_stage = cp_async_wait(stages - 2)
    storage, bits_type = ELEMENTS[tile.dtype].storage, float32 if itemsize == 4 else types.uint16
    run_of_column = cuda.jit(device=True, inline="always")(run_of)

    @cuda.jit(device=True, inline="always")
    def multiply(acc, v, x_at, w_at):
        """One stage: all taps read the same window at another offset."""
        c = int32(0)
        while c < chunks:
            load_window(v, x_at)
            products(acc, v, w_at)
            x_at = int32(x_at + chunk_bytes)
            w_at = int32(w_at + stage_weights)
            c = int32(c + 1)

    @cuda.jit(device=True, inline="always")
    def thread_place(thread):
        """Lane; which tile of the block; warp of the tile, and its first row of warps and column."""
        lane, warp = int32(thread & 31), int32(cuda.shfl_sync(0xFFFFFFFF, thread >> 5, 0))
        crew, crew_warp = int32(uint32(warp) // uint32(tile_warps)), int32(uint32(warp) % uint32(tile_warps))
        return lane, crew, crew_warp, int32(crew_warp // COLUMN_WARPS), int32((crew_warp & 1) * WARP_COLUMNS)

    @cuda.jit(device=True, inline="always")
    def block_place(block, group_tiles, out_per_group):
        """Group; first row of taps; first output channel, and how many there are from it on."""
        group = int32(block // int32(group_tiles))
        group_tile = int32(block - group * int32(group_tiles))
        row, channel = int32(group_tile % row_parts * phases), int32(group_tile // row_parts * channels)
        return group, row, int32(group * out_per_group + channel), int32(out_per_group - channel)

    def k5_mma(
        x, stride_n, stride_c, stride_l, w, bias, has_bias, y, batch, length, out_length, in_per_group, out_per_group,
        groups, padding, columns, first, tap_chunks, stages_a_chunk, group_tiles, alignment,
    ):  # fmt: skip
        shared = cuda.shared.array(0, dtype=float32)
        bits = cuda.shared.array(0, dtype=bits_type)
        table = cuda.shared.array(0, dtype=int32)
        values = cuda.local.array(BATCH, dtype=bits_type)
        base = shared_address(shared, 0)
        thread = int32(cuda.threadIdx.x)
        lane, crew, crew_warp, warp_row, warp_column = thread_place(thread)
        # Row tiles are neighbours in the grid: they read the same inputs. Column tiles may be more than one axis takes.
        block = int32(cuda.blockIdx.x)
        group, row, co, channels_left = block_place(block, group_tiles, out_per_group)
        column_tile = (int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y) * tiles
        x_column = lead - halo + crew * advance + warp_column + run_of_column(lane >> 2, itemsize) * RUN
        x_at = int32(base + ((lane & 3) * pair * pitch + x_column) * itemsize)
        w_at = int32(base + x_stage + warp_row * (fragments * 512) + lane * 16)

        acc = cuda.local.array(sums, dtype=float32)
        total = cuda.local.array(totals, dtype=float32)
        v = cuda.local.array(operands, dtype=int32)
        for z in range(sums):
            acc[z] = float32(0)
        row0 = int32(warp_row * (fragments * 16) + (lane >> 2))
        start(total if exact else acc, bias, has_bias, row0, co, channels_left)

        # The loads run stages - 1 ahead of the products: chunk, channel and the offsets are those of the next load.
        steps = int32(tap_chunks * stages_a_chunk)
        # A load goes where the products of the step before were: ``at`` is this step's stage, ``at_load`` that one.
        chunk, channel, at = int32(0), int32(0), int32(slot)
        group_channel, w_offset = int32(group * in_per_group), int64(block) * steps * stage_elements
        aim(table, column_tile, chunk, batch, length, columns, first, stride_n, stride_l)
        cuda.syncthreads()
        s = int32(1 - stages)
        while s < steps:
            if s >= 0:
                wait_for_stage()
                cuda.syncthreads()  # the stage has landed for everybody, and everybody has left the one loaded next
            if s + stages - 1 < steps:
                if several_chunks and channel == 0 and chunk > 0:
                    cuda.syncthreads()  # nobody still copies the chunk before
                    aim(table, column_tile, chunk, batch, length, columns, first, stride_n, stride_l)
                    cuda.syncthreads()
                at_load = int32(at - slot if at > 0 else (stages - 1) * slot)
                load(base, at_load, x, values, bits, (group_channel + channel) * stride_c, stride_c,
                     int32(in_per_group) - channel, w, w_offset)  # fmt: skip
                w_offset += stage_elements
                channel = int32(channel + depth)
                if channel >= in_per_group:
                    channel, chunk = int32(0), int32(chunk + 1)
            cp_async_commit()
            if s >= 0:
                multiply(acc, v, x_at + at, w_at + at)
                if exact:
                    for z in range(sums):
                        total[z] += acc[z]
                        acc[z] = float32(0)
            s = int32(s + 1)
            at = int32(at + slot if at < (stages - 1) * slot else 0)

        # Worked out again, so that registers do not hold it through the products.
        thread, block = recomputed(thread), recomputed(block)
        lane, crew, crew_warp, warp_row, warp_column = thread_place(thread)
        group, row, co, channels_left = block_place(block, group_tiles, out_per_group)
        row0, t = int32(warp_row * (fragments * 16) + (lane >> 2)), int32(lane & 3)
        at = int32(crew * staging)
        column0 = int32(warp_column + run_of_column(int32(2 * t), itemsize) * RUN)
        column1 = int32(warp_column + run_of_column(int32(2 * t + 1), itemsize) * RUN)
        cuda.syncthreads()  # the staging buffers lie where the stages were
        if zeros_first:
            e = int32(thread)
            while e < tiles * staging // 4:
                st_shared(base + e * 16, float32(0), float32(0), float32(0), float32(0))
                e = int32(e + threads)
            cuda.syncthreads()
        round = int32(0)
        while round < rounds:
            if exact:
                stage_sums(total, shared, base, at, row0, column0, column1, alignment[2])
            else:
                stage_sums(acc, shared, base, at, row0, column0, column1, alignment[2])
            cuda.syncthreads()
            # Worked out here, where the sums have left their registers.
            n, j = divmod((column_tile + crew) * advance, columns)
            there, straight = aim_store(n, j, batch, columns, first, out_length, padding, alignment)
            head = head_of(n, there, crew_warp, co, out_per_group * groups, out_length)
            write(head, y, shared, base, at, bias, has_bias, crew_warp, lane, n, j, there, straight, row, co,
                  channels_left, batch, columns, first, out_per_group * groups, out_length, padding,
                  alignment)  # fmt: skip
            row0 = int32(row0 - round_rows)
            co = int32(co + round_channels)
            channels_left = int32(channels_left - round_channels)
            round = int32(round + 1)
            if round < rounds:
                cuda.syncthreads()

    bits_array, stored, integers = flat(bits_type), flat(storage), (types.int64,)
    signature = (bits_array, *integers * 3, bits_array, stored, *integers, stored, *integers * 12)
    signature += (types.UniTuple(types.int64, 4),)
    return Kernel("k5_mma", k5_mma, signature, threads, config.shared_bytes, config.min_blocks, key=repr(config))


class WarpMatrix(TensorRung):
    name = "k5_mma"
    minimum_cc = (8, 0)
    idea = "tensor cores by mma.sync: a window in registers for all taps, cp.async stages, aligned runs of outputs"

    choose, make_kernel = staticmethod(choose), staticmethod(make_kernel)

    def config_on(self, device, problem, dtype, precision):
        x = torch.empty((problem.batch, problem.in_channels, problem.length), dtype=dtype, device="meta")
        return config_of(problem, precision, device, x.shape, x.stride(), 0)

    def tile(self, config):
        c, tiles = config, "a tile" if config.tiles == 1 else f"{config.tiles} tiles"
        return f"{tiles} of {c.tile.rows} rows by {COLUMNS} columns; {c.stages} stages of {c.depth} input channels"

    def prepare(self, x, w, bias, y, problem, config=None, precision=None):
        packing, launch = _plan(
            *(problem, config, precision, x.dtype, x.shape, x.strides, x.offset % 16),
            *(w, bias is not None, y.offset % SECTOR, device.of(x.index)),
        )
        launch = taking_bias(launch, bias)
        return lambda x, w, bias, y: launch(x, packed_weights(w, packing), bias, y)


@lru_cache(maxsize=1024)
def _plan(
    problem, config, precision, dtype, shape, strides, offset, w, has_bias, y_offset, here
) -> tuple[TensorPacking, Prepared]:
    """How the weights are packed, and the launch. ``strides``: of x, in elements; ``offset``, ``y_offset``: bytes by
    which x begins after a multiple of 16, and y after a sector's start; ``w``: the weights' layout."""
    precision = precision or (config.tile.precision if config else default_precision(dtype))
    config = config or config_of(problem, precision, here, shape, strides, offset)
    if not by_vectors(shape, strides, offset, config.tile):
        config = replace(config, x_vector=1)
    p, tile, chunks = problem, config.tile, config.channel_chunks(problem)
    first, columns = tile.columns(p)
    group_tiles, column_tiles = tile.row_tiles(p), -(-tile.column_tiles(p) // config.tiles)
    planes = -(-column_tiles // GRID_AXIS)
    sizes = p.batch, p.length, p.out_length, p.in_channels_per_group, p.out_channels_per_group, p.groups, p.padding
    packing = packing_of(p, tile, "mma", chunks, w)
    packed = alike((packing.size,), dtype)
    launch = make_kernel(config).prepare(
        (group_tiles * p.groups, -(-column_tiles // planes), planes),
        *(alike(shape, dtype, strides), *strides, packed),
        *(alike((p.out_channels,), dtype) if has_bias else packed, has_bias),
        *(alike((p.batch, p.out_channels, p.out_length), dtype), *sizes, columns, first),
        *(tile.tap_chunks(p), chunks // config.chunks, group_tiles),
        alignment_of(y_offset, p, tile, gaps_between(tile)),
    )
    return packing, launch
