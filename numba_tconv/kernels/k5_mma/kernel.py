"""k5: tensor cores, one warp at a time (kernels/README.md).

k4's matrix product by m16n8k8 or, in 16 bits, m16n8k16.

* producer.py: fills the ring, with zeros outside the signal.
* mainloop.py: a lane's window of eight columns serves all taps.
* epilogue.py: a staging buffer, then common/tensor_core's store.

*Streamed* (here): weights come with every stage; one block stores while another multiplies. *Resident* (resident.py): a
tile's weights stay in shared memory.

Measured (H200, kb64, tf32): 1.89 ms."""

import math
from dataclasses import replace
from functools import cache, lru_cache

from numba import cuda, float32, int32, int64, types, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.arguments import of_problem, over_planes
from numba_tconv.kernels.common.packed_weights import after_packing
from numba_tconv.kernels.common.tensor_core.outputs import Place
from numba_tconv.kernels.common.tensor_core.pack import TensorPacking, packing_of
from numba_tconv.kernels.common.tensor_core.rung import (
    TensorRung,
    by_vectors,
    contiguous_rows,
    default_precision,
    no_tile,
)
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
)
from numba_tconv.runtime import device
from numba_tconv.runtime.kernel import Kernel, Prepared, alike
from numba_tconv.runtime.layout import Layout

from .arguments import Input, Loop, RowTile, Sizes, Weights, bits_type, make_thread_of, types_of
from .choose import choose, config_of, resident_blocks
from .epilogue import gaps_between, make_clear, make_store_tile, output_of
from .mainloop import make_products, make_start, make_window
from .producer import BATCH, GroupInput, Shared, make_load, make_selectors_of
from .resident import make_kernel as make_resident_kernel
from .tile import RUN, Config, run_of


@cache
def make_kernel(config: Config) -> Kernel:
    return make_resident_kernel(config) if config.resident_weights else _make_kernel(config)


def _make_multiply(config: Config):
    """Build ``multiply``: adds a stage's products to ``acc``, returns the sums' factor."""
    chunks, stage_weights = config.chunks, config.tile.depth_weights
    chunk_bytes = config.tile.depth * config.pitch * config.tile.itemsize
    load_window, products = make_window(config), make_products(config)

    @device_function
    def multiply(acc, v, x_at, w_at, selectors, scales):
        c, inverse = int32(0), float32(1)
        while c < chunks:
            inverse = load_window(v, x_at, selectors, scales)
            products(acc, v, w_at)
            x_at = int32(x_at + chunk_bytes)
            w_at = int32(w_at + stage_weights)
            c = int32(c + 1)
        return inverse

    return multiply


def _make_row_tile_of(config: Config):
    """Build a block's RowTile; neighbours read the same inputs."""
    phases, channels, row_parts = config.tile.phases, config.tile.channels, config.tile.row_parts

    @device_function
    def row_tile_of(block, group_tiles, out_per_group):
        group = int32(block // int32(group_tiles))
        group_tile = int32(block - group * int32(group_tiles))
        row, channel = int32(group_tile % row_parts * phases), int32(group_tile // row_parts * channels)
        return RowTile(group, row, int32(group * out_per_group + channel), int32(out_per_group - channel))

    return row_tile_of


def _make_kernel(config: Config) -> Kernel:
    tile, stages, threads, tiles, depth = config.tile, config.stages, config.threads, config.tiles, config.depth
    itemsize, pitch, pair, lead, halo = tile.itemsize, config.pitch, 4 // tile.itemsize, tile.lead, config.halo
    x_stage, slot, advance = config.x_stage, config.x_stage + config.w_stage, tile.advance
    stage_elements, fragments = config.w_stage // itemsize, config.fragments
    staging, staging_bytes = tile.staging, config.staging_bytes
    sums, operands = fragments * RUN * 4, 2 * tile.operand_halves * config.window
    # Tensor cores truncate: CUDA cores add up short sums.
    exact, several_chunks = tile.operand_halves == 2, tile.several_chunks
    totals, lane_rows = sums if exact else 1, 2 * fragments
    thread_of, row_tile_of, selectors_of = make_thread_of(config), _make_row_tile_of(config), make_selectors_of(config)
    (aim, load), (load_biases, start), multiply = make_load(config), make_start(config), _make_multiply(config)
    store_tile, zeros_first = make_store_tile(config)
    clear = make_clear(tiles * staging, threads)
    wait_for_stage, bits_of_x = cp_async_wait(stages - 2), bits_type(config)
    run_of_column = device_function(run_of)

    def k5_mma(x, stride_l, weights, y, sizes, loop, alignment):
        shared = cuda.shared.array(0, dtype=float32)
        bits = cuda.shared.array(0, dtype=bits_of_x)
        table = cuda.shared.array(0, dtype=int32)
        values = cuda.local.array(BATCH, dtype=bits_of_x)
        base = shared_address(shared, 0)
        of_loads = Shared(base, table, bits, values)
        number = int32(cuda.threadIdx.x)
        me = thread_of(number)
        block = int32(cuda.blockIdx.x)
        row_tile = row_tile_of(block, loop.group_tiles, sizes.out_per_group)
        column_tile = (int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y) * tiles
        x_column = lead - halo + me.team * advance + me.first_column + run_of_column(me.lane >> 2, itemsize) * RUN
        x_at = int32(base + ((me.lane & 3) * pair * pitch + x_column) * itemsize)
        w_at = int32(base + x_stage + me.warp_row * (fragments * 512) + me.lane * 16)

        acc = cuda.local.array(sums, dtype=float32)
        total = cuda.local.array(totals, dtype=float32)
        v = cuda.local.array(operands, dtype=int32)
        biases = cuda.local.array(lane_rows, dtype=float32)
        for z in range(sums):
            acc[z] = float32(0)
        load_biases(biases, weights, int32(me.warp_row * (fragments * 16) + (me.lane >> 2)), row_tile)
        start(total if exact else acc, biases)
        steps = int32(loop.tap_chunks * loop.stages_a_chunk)
        # The next load, into the stage before ``stage``.
        chunk, channel, stage = int32(0), int32(0), int32(slot)
        signal = GroupInput(x.data, sizes.batch, sizes.length, sizes.columns, sizes.first_column, sizes.in_per_group,
                        row_tile.group * sizes.in_per_group * x.stride_c, x.stride_n, x.stride_c)  # fmt: skip
        w_first = int64(block) * steps * stage_elements
        source = aim(table, column_tile, chunk, stride_l, signal)
        selectors = selectors_of(column_tile * advance // sizes.columns, signal)
        griddepcontrol_wait()  # for packed weights
        scales = scales_of(weights.packed[uint64(weights.packed.shape[0] - 1)]) if exact else (int32(0), int32(0))
        cuda.syncthreads()
        s = int32(1 - stages)
        while s < steps:
            if s >= 0:
                wait_for_stage()
                cuda.syncthreads()  # the stage has landed; a slot is free
            if s + stages - 1 < steps:
                if several_chunks and channel == 0 and chunk > 0:
                    cuda.syncthreads()
                    source = aim(table, column_tile, chunk, stride_l, signal)
                    cuda.syncthreads()
                to_stage = int32(stage - slot if stage > 0 else (stages - 1) * slot)
                load(of_loads, to_stage, channel, signal, source, selectors, weights.packed, w_first)
                w_first += stage_elements
                channel = int32(channel + depth)
                if channel >= sizes.in_per_group:
                    channel, chunk = int32(0), int32(chunk + 1)
            cp_async_commit()
            if s >= 0:
                inverse = multiply(acc, v, x_at + stage, w_at + stage, selectors, scales)
                if exact:
                    for z in range(sums):
                        total[z] += acc[z] * inverse
                        acc[z] = float32(0)
            s = int32(s + 1)
            stage = int32(stage + slot if stage < (stages - 1) * slot else 0)

        # Recomputed to free registers during the products.
        number, block = recomputed(number), recomputed(block)
        me, row_tile = thread_of(number), row_tile_of(block, loop.group_tiles, sizes.out_per_group)
        cuda.syncthreads()  # staging overwrites the stages
        if zeros_first:
            clear(base, number)
            cuda.syncthreads()
        n, j = divmod((column_tile + me.team) * advance, sizes.columns)
        place = Place(n, j, row_tile.first_row, row_tile.first_channel, row_tile.channels_left, 0, 0)
        out = output_of(y, weights, sizes, sizes.out_per_group * sizes.groups, alignment)
        store_tile(total if exact else acc, out, shared, base, int32(me.team * staging_bytes), place, me)

    x, *others, alignment = types_of(config)
    signature = x, types.int64, *others, alignment
    return Kernel("k5_mma", k5_mma, signature, threads, config.shared_bytes, config.min_blocks, key=repr(config))


class WarpMatrix(TensorRung):
    name = "k5_mma"
    order = "mma"
    minimum_cc = (8, 0)
    idea = "tensor cores by mma.sync: a window in registers for all taps, cp.async stages, aligned runs of outputs"

    choose, make_kernel = staticmethod(choose), staticmethod(make_kernel)

    def refusal(self, problem, dtype, precision, device):
        reason = super().refusal(problem, dtype, precision, device)
        return reason or (None if choose(problem, precision, device) else no_tile(problem))

    def config_of(self, x, problem, precision, device):
        return config_of(problem, precision, device, x.shape, x.strides, x.offset % 16)

    def tile(self, config):
        c, tiles = config, "a tile" if config.tiles == 1 else f"{config.tiles} tiles"
        if c.resident_weights:
            tiles = f"resident weights, {c.teams} teams, each with tiles"
        return f"{tiles} of {c.tile.rows} rows by {COLUMNS} columns; {c.stages} stages of {c.depth} input channels"

    def prepare(self, x, w, bias, y, problem, config=None, precision=None):
        has_bias, here = bias is not None, device.of(x.index)
        packing, launch = _plan(problem, config, precision, x, w, has_bias, y.offset % SECTOR, here)
        return taking_bias(after_packing(packing, launch), bias)


@lru_cache(maxsize=1024)
def _plan(
    problem: Problem,
    config: Config | None,
    precision: str | None,
    x: Layout,
    w: Layout,
    has_bias: bool,
    y_offset: int,
    here: device.Device,
) -> tuple[TensorPacking, Prepared]:
    """The packing and the launch. ``y_offset``: bytes from a sector to y."""
    dtype, shape, strides, offset = x.dtype, x.shape, x.strides, x.offset % 16
    precision = precision or (config.tile.precision if config else default_precision(dtype))
    config = config or config_of(problem, precision, here, shape, strides, offset)
    if not by_vectors(shape, strides, offset, config.tile):
        unaligned = choose(problem, precision, here, aligned=False, contiguous=contiguous_rows(shape, strides))
        config = unaligned if config.resident_weights else replace(config, x_vector=4 // dtype.itemsize)
    p, tile, chunks = problem, config.tile, config.channel_chunks(problem)
    first_column, columns = tile.columns(p)
    column_tiles = -(-tile.column_tiles(p) // config.tiles)
    loop = Loop(tile.tap_chunks(p), chunks // config.chunks, tile.row_tiles(p))
    packing = packing_of(p, tile, WarpMatrix.order, chunks, w)
    packed = alike((packing.size,), dtype)
    x = Input(alike(shape, dtype, strides), *strides[:2])
    weights = Weights(packed, alike((p.out_channels,), dtype) if has_bias else packed, has_bias)
    y = alike(p.out_shape, dtype)
    sizes = of_problem(Sizes, p, columns=columns, first_column=first_column)
    alignment = alignment_of(y_offset, p, tile, gaps_between(tile))
    row_tiles, kernel = loop.group_tiles * p.groups, make_kernel(config)
    if config.resident_weights:
        grid = row_tiles, resident_blocks(p, tile, here), 1
        arguments = x, weights, y, sizes, loop, column_tiles, alignment
    else:
        grid = over_planes(row_tiles, column_tiles)
        arguments = x, strides[2], weights, y, sizes, loop, alignment
    early = here.spreads_early(math.prod(grid), kernel.shared_bytes, packing.blocks)
    return packing, kernel.prepare(grid, *arguments, early=early)
