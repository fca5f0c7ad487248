"""k5: tensor cores, one warp at a time.

    x, packed w --cp.async--> ring of stages --window, fragments--> registers --mma.sync--> sums --staging--> y

k4's matrix product with mma.sync: one instruction of a warp multiplies 16 x 8 weights by 8 x 8 inputs, or twice as deep
with 16-bit elements. It runs on every GPU from sm_80 on.

* producer.py: cp.async fills the ring, with zeros outside the signal. Rows of x may begin anywhere.
* mainloop.py: a lane owns eight consecutive columns, so one window serves all taps of a stage. A fragment of weights is
  one 16-byte vector a lane.
* epilogue.py: a staging buffer, then a store of kernels/common/tensor_core.

Two modes. *Streamed* (here): weights are copied with every stage of x, and two or more blocks share a multiprocessor:
one stores while another multiplies. *Resident* (resident.py): the weights of a tile's rows stay in shared memory, and a
block computes one tile after the other.

Measured (H200, kb64, tf32): 1.86 ms.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, lru_cache

import torch
from numba import cuda, float32, int32, int64, types, uint32, uint64

from numba_tconv.kernels.common.packed_weights import after_packing
from numba_tconv.kernels.common.tensor_core.pack import TensorPacking, packing_of
from numba_tconv.kernels.common.tensor_core.rung import TensorRung, by_vectors, contiguous_rows, default_precision
from numba_tconv.kernels.common.tensor_core.split_operand import scales_of
from numba_tconv.kernels.common.tensor_core.store_any import alignment_of
from numba_tconv.kernels.common.tensor_core.tile import COLUMNS, SECTOR
from numba_tconv.kernels.rung import taking_bias
from numba_tconv.ptx import (
    cp_async_commit,
    cp_async_wait,
    device_function,
    griddepcontrol_wait,
    recomputed,
    shared_address,
    st_shared,
)
from numba_tconv.runtime import device
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat

from .choose import choose, config_of, resident_blocks
from .epilogue import gaps_between, make_store_tile
from .mainloop import make_products, make_start, make_window
from .producer import BATCH, make_load, make_turns
from .resident import make_kernel as make_resident_kernel
from .tile import COLUMN_WARPS, RUN, WARP_COLUMNS, Config, run_of

GRID_AXIS = 65_535  # blocks along y or z of a grid, at most


@cache
def make_kernel(config: Config) -> Kernel:
    return make_resident_kernel(config) if config.resident_weights else _make_kernel(config)


def _make_kernel(config: Config) -> Kernel:
    tile, stages, threads, chunks, tiles = config.tile, config.stages, config.threads, config.chunks, config.tiles
    itemsize, depth, pitch = config.tile.itemsize, config.depth, config.pitch
    x_stage, slot, stage_weights = config.x_stage, config.x_stage + config.w_stage, tile.depth_weights
    stage_elements, lead, halo, advance = config.w_stage // itemsize, tile.lead, config.halo, tile.advance
    fragments, tile_warps, phases, channels = config.fragments, config.tile_warps, tile.phases, tile.channels
    row_parts, staging, staging_bytes, pair = tile.row_parts, tile.staging, config.staging_bytes, 4 // itemsize
    chunk_bytes = tile.depth * pitch * itemsize
    sums, operands = fragments * RUN * 4, 2 * tile.parts * config.window
    # Tensor cores truncate when they add; where fp32's error is promised, CUDA cores add up short sums.
    exact, several_chunks = tile.parts == 2, tile.several_chunks
    totals, lane_rows = sums if exact else 1, 2 * fragments
    aim, load = make_load(config)
    turns_of = make_turns(config)
    load_window, products = make_window(config), make_products(config)
    load_biases, start = make_start(config)
    store_tile, zeros_first = make_store_tile(config)
    wait_for_stage = cp_async_wait(stages - 2)
    storage, bits_type = ELEMENTS[tile.dtype].storage, float32 if itemsize == 4 else types.uint16
    run_of_column = device_function(run_of)

    @device_function
    def multiply(acc, v, x_at, w_at, turns, scales):
        """One stage: all taps read one window at different offsets. Returns the factor of the products."""
        c, inverse = int32(0), float32(1)
        while c < chunks:
            inverse = load_window(v, x_at, turns, scales)
            products(acc, v, w_at)
            x_at = int32(x_at + chunk_bytes)
            w_at = int32(w_at + stage_weights)
            c = int32(c + 1)
        return inverse

    @device_function
    def thread_place(thread):
        """Lane; tile of the block; warp of the tile, its row of warps and its first column."""
        lane, warp = int32(thread & 31), int32(cuda.shfl_sync(0xFFFFFFFF, thread >> 5, 0))
        crew, crew_warp = int32(uint32(warp) // uint32(tile_warps)), int32(uint32(warp) % uint32(tile_warps))
        return lane, crew, crew_warp, int32(crew_warp // COLUMN_WARPS), int32((crew_warp & 1) * WARP_COLUMNS)

    @device_function
    def block_place(block, group_tiles, out_per_group):
        """Group; first row of taps; first output channel of all; channels of the group from it on."""
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
        # Row tiles are neighbours in the grid, because they read the same inputs. Column tiles may need two axes.
        block = int32(cuda.blockIdx.x)
        group, row, co, channels_left = block_place(block, group_tiles, out_per_group)
        column_tile = (int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y) * tiles
        x_column = lead - halo + crew * advance + warp_column + run_of_column(lane >> 2, itemsize) * RUN
        x_at = int32(base + ((lane & 3) * pair * pitch + x_column) * itemsize)
        w_at = int32(base + x_stage + warp_row * (fragments * 512) + lane * 16)

        acc = cuda.local.array(sums, dtype=float32)
        total = cuda.local.array(totals, dtype=float32)
        v = cuda.local.array(operands, dtype=int32)
        biases = cuda.local.array(lane_rows, dtype=float32)
        for z in range(sums):
            acc[z] = float32(0)
        row0 = int32(warp_row * (fragments * 16) + (lane >> 2))
        load_biases(biases, bias, has_bias, row0, co, channels_left)
        start(total if exact else acc, biases)
        # Loads run stages - 1 ahead: chunk, channel and w_offset are the next load's.
        steps = int32(tap_chunks * stages_a_chunk)
        # ``at`` is this step's stage; a load goes to the stage of the step before, ``at_load``.
        chunk, channel, at = int32(0), int32(0), int32(slot)
        rows = in_per_group, group * in_per_group * stride_c, stride_n, stride_c
        w_offset = int64(block) * steps * stage_elements
        aimed = aim(table, x, column_tile, chunk, batch, length, columns, first, stride_l, rows)
        turns = turns_of(x, column_tile * advance // columns, rows)
        griddepcontrol_wait()  # for the packed weights
        scales = scales_of(w[uint64(w.shape[0] - 1)]) if exact else (int32(0), int32(0))
        cuda.syncthreads()
        s = int32(1 - stages)
        while s < steps:
            if s >= 0:
                wait_for_stage()
                cuda.syncthreads()  # the stage has landed, and all threads have left the one loaded next
            if s + stages - 1 < steps:
                if several_chunks and channel == 0 and chunk > 0:
                    cuda.syncthreads()  # all threads have left the chunk before
                    aimed = aim(table, x, column_tile, chunk, batch, length, columns, first, stride_l, rows)
                    cuda.syncthreads()
                at_load = int32(at - slot if at > 0 else (stages - 1) * slot)
                load(base, at_load, x, values, bits, channel, rows, aimed, turns, w, w_offset)
                w_offset += stage_elements
                channel = int32(channel + depth)
                if channel >= in_per_group:
                    channel, chunk = int32(0), int32(chunk + 1)
            cp_async_commit()
            if s >= 0:
                inverse = multiply(acc, v, x_at + at, w_at + at, turns, scales)
                if exact:
                    for z in range(sums):
                        total[z] += acc[z] * inverse
                        acc[z] = float32(0)
            s = int32(s + 1)
            at = int32(at + slot if at < (stages - 1) * slot else 0)

        # Recomputed, so that registers do not hold it through the products.
        thread, block = recomputed(thread), recomputed(block)
        lane, crew, crew_warp, warp_row, warp_column = thread_place(thread)
        group, row, co, channels_left = block_place(block, group_tiles, out_per_group)
        cuda.syncthreads()  # the staging buffers lie where the stages were
        if zeros_first:
            e = int32(thread)
            while e < tiles * staging // 4:
                st_shared(base + e * 16, float32(0), float32(0), float32(0), float32(0))
                e = int32(e + threads)
            cuda.syncthreads()
        # Computed here, where the sums have left their registers.
        n, j = divmod((column_tile + crew) * advance, columns)
        store_tile(total if exact else acc, y, shared, base, int32(crew * staging_bytes), bias, has_bias, crew,
                   crew_warp, lane, n, j, row, co, channels_left, batch, columns, first, out_per_group * groups,
                   out_length, padding, alignment)  # fmt: skip

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
        if c.resident_weights:
            tiles = f"resident weights, {c.teams} teams, each with tiles"
        return f"{tiles} of {c.tile.rows} rows by {COLUMNS} columns; {c.stages} stages of {c.depth} input channels"

    def prepare(self, x, w, bias, y, problem, config=None, precision=None):
        packing, launch = _plan(
            *(problem, config, precision, x.dtype, x.shape, x.strides, x.offset % 16),
            *(w, bias is not None, y.offset % SECTOR, device.of(x.index)),
        )
        return taking_bias(after_packing(packing, launch), bias)


@lru_cache(maxsize=1024)
def _plan(
    problem, config, precision, dtype, shape, strides, offset, w, has_bias, y_offset, here
) -> tuple[TensorPacking, Prepared]:
    """The packing and the launch. ``strides``: of x, in elements. ``offset``, ``y_offset``: bytes from a multiple of 16
    to x, and from a sector to y. ``w``: layout of the weights (C_in, C_out/groups, K).
    """
    precision = precision or (config.tile.precision if config else default_precision(dtype))
    config = config or config_of(problem, precision, here, shape, strides, offset)
    if not by_vectors(shape, strides, offset, config.tile):
        unaligned = choose(problem, precision, here, aligned=False, contiguous=contiguous_rows(shape, strides))
        config = unaligned if config.resident_weights else replace(config, x_vector=4 // dtype.itemsize)
    p, tile, chunks = problem, config.tile, config.channel_chunks(problem)
    first, columns = tile.columns(p)
    group_tiles, column_tiles = tile.row_tiles(p), -(-tile.column_tiles(p) // config.tiles)
    planes, x_strides = -(-column_tiles // GRID_AXIS), strides
    along = -(-column_tiles // planes), planes
    chunks_of_taps, last = (tile.tap_chunks(p), chunks // config.chunks, group_tiles), ()
    if config.resident_weights:  # neighbouring elements of x are adjacent, so no third stride
        along, x_strides, last = (resident_blocks(p, tile, here), 1), strides[:2], (column_tiles,)
    sizes = p.batch, p.length, p.out_length, p.in_channels_per_group, p.out_channels_per_group, p.groups, p.padding
    packing = packing_of(p, tile, "mma", chunks, w)
    packed = alike((packing.size,), dtype)
    grid, kernel = (group_tiles * p.groups, *along), make_kernel(config)
    launch = kernel.prepare(
        grid,
        *(alike(shape, dtype, strides), *x_strides, packed),
        *(alike((p.out_channels,), dtype) if has_bias else packed, has_bias),
        *(alike((p.batch, p.out_channels, p.out_length), dtype), *sizes, columns, first),
        *(*chunks_of_taps, *last),
        alignment_of(y_offset, p, tile, gaps_between(tile)),
        early=here.spreads_early(math.prod(grid), kernel.shared_bytes, packing.blocks),
    )
    return packing, launch
