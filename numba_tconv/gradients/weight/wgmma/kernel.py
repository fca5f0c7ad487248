"""grad_weight_wgmma: a warp-specialised wgmma kernel, its long sums split over blocks.

Sums run over positions, contiguous in both operands. Taps read the same row of grad_output some positions on, at any
stride. Rows that do not suit become planes first (gradients/planes.py).

* Producer: one warp fills the ring by TMA: 128 bytes of x's rows and the grad_output that they meet, rounded to TF32,
  zero outside the signal.
* Consumers: two warpgroups with own pairs, or alternate stages.
* Store: sum.py adds up splits."""

from dataclasses import replace
from functools import cache, lru_cache

import torch
from numba import cuda, float32, int32, int64

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients import planes
from numba_tconv.gradients.rung import FEWEST_CHANNELS, too_few
from numba_tconv.gradients.wgmma_ring import (
    BLOCK,
    CONSUMERS,
    MAPS,
    REGISTERS,
    THREADS,
    Consumer,
    TensorMaps,
    Thread,
    WgmmaGradient,
    make_mainloop,
    make_setup,
    template_of_b,
    template_of_rows,
    workspace,
)
from numba_tconv.kernels.common.arguments import arguments
from numba_tconv.kernels.common.pipeline import BARRIER, EMPTY, FULL, Pipe
from numba_tconv.kernels.common.rows import in_rows
from numba_tconv.kernels.common.rows import make_kernel as row_copy
from numba_tconv.kernels.common.tensor_core.rung import default_precision
from numba_tconv.kernels.common.tensor_map import ALIGNMENT, MAP_BYTES, lies_in_rows, rows_alike
from numba_tconv.kernels.rung import Step
from numba_tconv.ptx import (
    device_function,
    mbarrier_wait,
    opaque,
    setmaxnreg,
    shared_address,
    swizzled_descriptor,
    wgmma_wait,
)
from numba_tconv.runtime import device as gpu
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import GIVEN, Kernel, Prepared, flat
from numba_tconv.runtime.kernel import alike as tensor_alike
from numba_tconv.runtime.layout import NO_GPU, Layout, room

from . import sum as grad_weight_sum
from .arguments import Block, Grid, Lane, Rows
from .choose import choose, choose_for, splits_of
from .epilogue import Staging, make_store
from .operands import BARRIER as READERS
from .operands import NOT_MINE, make_operands
from .producer import Source, make_first_pair, make_producer
from .tile import Config

CONTIGUOUS = torch.contiguous_format


@cache
def make_kernel(config: Config) -> Kernel:
    barriers, stages = config.barriers, config.stages
    all_sums, all_operands, all_rows = config.sums, config.sets * config.operands, 2 * config.blocks
    all_starts = all_rows if config.clears else 1
    alternate, chunk_elements = config.alternate, config.tap_chunk * config.window.step * config.window.stride
    first_pair = make_first_pair(config)
    setup = make_setup(config, 4 if alternate else 4 * CONSUMERS)
    alike, channels, positions = config.alike, config.channels, config.positions
    sets_maps, block_maps = alike * MAP_BYTES, (alike + 1) * MAP_BYTES
    x_bytes, flags, lane_bytes, itemsize = config.b_bytes, config.words, config.lane_bytes, config.itemsize
    set_bytes, pitch, vector = config.pieces * config.spacing, config.width * itemsize, 16 // itemsize
    pairs, phases, dilation, clears = config.pairs, config.window.phases, config.window.dilation, config.clears > 0
    odd, warpgroup_rows = config.odd, config.warpgroup_rows
    publish_maps, copy = make_producer(config)
    mainloop = make_mainloop(config, make_operands(config), CONSUMERS if alternate else 1, config.sets)
    store, wait_for_all = make_store(config), wgmma_wait(0)
    grow, shrink = setmaxnreg(REGISTERS[0], True), setmaxnreg(REGISTERS[1], False)
    descriptor_of = device_function(swizzled_descriptor)

    def grad_weight_wgmma(maps, result, rows, grid):
        shared = cuda.shared.array(0, dtype=float32)
        base = int32((shared_address(shared, 0) + 1023) & -1024)
        number = int32(cuda.threadIdx.x)
        thread = Thread(base, int32(number & 31), int32(cuda.shfl_sync(0xFFFFFFFF, number >> 5, 0)))
        pipe = Pipe(int32(base + barriers), int32(base + barriers + BARRIER * stages), stages)
        if number == 0:
            setup(pipe, base)
        cuda.syncthreads()
        split = int64(cuda.blockIdx.x) // grid.tiles
        tile = int32(int64(cuda.blockIdx.x) - split * grid.tiles)
        rest, channel_tile = tile // int32(grid.channel_tiles), tile % int32(grid.channel_tiles)
        rest, pair_tile = rest // int32(grid.pair_tiles), rest % int32(grid.pair_tiles)
        group, tap_chunk = rest // int32(grid.tap_chunks), rest % int32(grid.tap_chunks)
        first_element = int32(rows.first + tap_chunk * chunk_elements)
        block = Block(split, tile, group, pair_tile, channel_tile)
        own_stages = int32((grid.all_stages - split + grid.splits - 1) // grid.splits)

        if thread.warp >= 4 * CONSUMERS:
            shrink()
            if thread.warp == 4 * CONSUMERS:
                g_maps = maps.workspace + int64(cuda.blockIdx.x) * block_maps
                x_map = int64(g_maps + sets_maps)
                publish_maps(maps, rows, g_maps, x_map, thread)
                if thread.lane == 0:
                    g_channel, _ = first_pair(pair_tile)
                    g_row = int32(group * grid.group_rows + g_channel) // alike
                    x_row = int32(group * grid.group_channels + channel_tile * channels)
                    source = Source(g_maps, x_map, g_row, x_row, first_element, rows.stride_c)
                    # Splits take stages in turn: blocks read the same stretch together.
                    sample, sample_step = int32(split // grid.sample_stages), int32(grid.splits // grid.sample_stages)
                    position = int32((split - sample * grid.sample_stages) * positions)
                    position_step = int32((grid.splits - sample_step * grid.sample_stages) * positions)
                    end = int32(grid.sample_stages * positions)
                    stage, parity, stages_left = int32(0), int32(EMPTY), own_stages
                    while stages_left > 0:
                        mbarrier_wait(pipe.empty + BARRIER * stage, parity)
                        copy(source, sample, position, pipe, stage, base)
                        position, sample = int32(position + position_step), int32(sample + sample_step)
                        if position >= end:
                            position, sample = int32(position - end), int32(sample + 1)
                        stages_left, stage = int32(stages_left - 1), int32(stage + 1)
                        if stage == stages:
                            stage, parity = int32(0), int32(parity ^ 1)
        else:
            grow()
            consumer = Consumer(int32(thread.warp >> 2), int32(thread.warp & 3), thread.lane)
            sums = cuda.local.array(all_sums, dtype=float32)
            registers = cuda.local.array(all_operands, dtype=int32)
            for z in range(all_sums):
                sums[z] = opaque(float32(0))
            lane_rows = cuda.local.array(all_rows, dtype=int32)
            starts = cuda.local.array(all_starts, dtype=int32)
            _, begin = first_pair(pair_tile)
            for z in range(all_rows):  # padding rows read the last
                row = int32(16 * consumer.warp + (thread.lane >> 2) + z // 2 * BLOCK + z % 2 * 8
                            + warpgroup_rows * consumer.warpgroup)  # fmt: skip
                m = int32(begin + min(row, pairs - 1))
                channel = m // phases
                element = (first_element + channel % alike * int32(rows.stride_c)) & (vector - 1)
                box_row = channel % alike * set_bytes + channel // alike * pitch
                start = int32(base + x_bytes + box_row + element * itemsize)
                lane_rows[z] = int32(start + (m % phases * dilation - odd) * itemsize + (thread.lane & 3) * lane_bytes)
                if clears:  # a channel's first pair in the tile
                    mine = row < pairs and (row == 0 or m % phases == 0)
                    starts[z] = start if mine else int32(NOT_MINE)
            barrier = int32(READERS + consumer.warpgroup if alternate else READERS)
            lane = Lane(lane_rows, starts, int32(base + flags), int32(thread.lane & 3), int32(-first_element), barrier)
            descriptor = descriptor_of(int64(thread.base))
            stage = int32(consumer.warpgroup if alternate else 0)
            stages_left = int32(own_stages - stage)
            mainloop(sums, registers, lane, descriptor, stage, int32(FULL), stages_left, pipe, thread.lane == 0)
            wait_for_all()
            staging = Staging(shared, int32((thread.base - shared_address(shared, 0)) >> 2))
            store(sums, result, staging, grid, block, consumer)

    stored = ELEMENTS[DTYPES[config.precision]].storage if config.direct else float32
    signature = (MAPS, flat(stored), arguments(Rows), arguments(Grid))
    return Kernel("grad_weight_wgmma", grad_weight_wgmma, signature, THREADS, config.shared_bytes, key=repr(config))


class WeightWarpgroup(WgmmaGradient):
    name = "grad_weight_wgmma"
    of = "grad_weight"
    idea = "Hopper's wgmma over positions, split over blocks: both operands as they lie in memory, boxes in a ring"

    def no_tile(self, problem, precision):
        if choose(problem, precision, 0) is None:
            return f"no tile fits {problem.taps.step} positions between two taps"
        return planes.too_many_rows(problem)

    def unsuited(self, problem, dtype, precision, device):
        fewest = min(problem.in_channels_per_group, planes.pairs_of(problem))
        # With one group products are few.
        return too_few(fewest) if fewest < FEWEST_CHANNELS and problem.groups > 1 else None

    def config(self, problem, dtype, device=None, precision=None):
        """As choose.choose_for."""
        g = Layout.contiguous(problem.out_shape, dtype, NO_GPU)
        alike = rows_alike(g.shape, g.strides, dtype.itemsize)
        return choose_for(problem, precision or default_precision(dtype), alike, device or gpu.H200)

    def steps(self, config, problem, device=gpu.H200):
        separated, tile = config
        dtype = DTYPES[tile.precision]
        apart = [] if separated is None else [Step("planes", planes.make_kernel(separated))]
        sums = [] if tile.direct else map(grad_weight_sum.make_kernel, grad_weight_sum.configs(dtype))
        main = Step("main", make_kernel(tile), tile.shared_bytes)
        return [*apart, Step("copy", row_copy(dtype)), main, *(Step("add up", kernel) for kernel in sums)]

    def prepare(self, grad_output, x, result, problem, config=None, precision=None):
        p, device = problem, gpu.of(result.index)
        precision = precision or default_precision(result.dtype)
        offset = grad_output.offset % ALIGNMENT
        alike = 0 if offset else rows_alike(grad_output.shape, grad_output.strides, result.dtype.itemsize)
        separated, tile = config or choose_for(p, precision, alike, device)
        if tile.direct and result.offset % ALIGNMENT:
            tile = replace(tile, direct=False, plane_phases=0)
        for_others = separated is None and tile.alike != alike
        aligned = result.offset % ALIGNMENT == 0

        def prepared(g, x):
            blocks, sums, launch = _prepared(p, tile, separated is None, g, x, device)
            maps_room = workspace(blocks, tile.alike, result.index)
            partials_room = room((sums * tile.blocks_of(p) * tile.tile_sums,), torch.float32, result.index)
            to_add = None if tile.direct else grad_weight_sum.config_of(p, result.dtype, aligned)
            add_up = to_add and grad_weight_sum.prepare(p, tile, sums, to_add)

            def fill(g, x, result):
                maps, partials = maps_room(), None if tile.direct else partials_room()
                launch(g.data_ptr(), x.data_ptr(), maps.data_ptr(), result if tile.direct else partials)
                if add_up:
                    add_up(partials, result)

            return fill

        def fill_from_copies(grad_output, x, result):
            if for_others:
                grad_output = in_rows(grad_output) if tile.alike == 1 else grad_output.clone(memory_format=CONTIGUOUS)
            x, g = in_rows(x), grad_output if separated is None else planes.make_planes(grad_output, p)
            prepared(Layout.of(g), Layout.of(x))(g, x, result)

        if for_others or separated is not None or not lies_in_rows(x):
            return fill_from_copies
        return prepared(grad_output, x)


@lru_cache(maxsize=1024)
def _prepared(
    problem: Problem, tile: Config, in_place: bool, g: Layout, x: Layout, device: gpu.Device
) -> tuple[int, int, Prepared]:
    """Blocks, partial sums of an element, and the launch; ``in_place``: g is grad_output."""
    p = problem
    first, group_rows = (-p.padding, p.out_channels_per_group) if in_place else (0, planes.pairs_of(p))
    splits, tiles = 1 if tile.direct else splits_of(p, tile, device), tile.blocks_of(p)
    sums = splits * (CONSUMERS if tile.alternate else 1)
    if tile.direct:
        stored = tensor_alike((p.in_channels * p.out_channels_per_group * p.kernel_size,), x.dtype)
    else:
        stored = tensor_alike((sums * tiles * tile.tile_sums,), torch.float32)
    sample_stages, all_stages = tile.stages_of(p)
    grid = Grid(
        group_rows=group_rows,
        group_channels=p.in_channels_per_group,
        **tile.tiles_of(p)._asdict(),
        tiles=tiles,
        sample_stages=sample_stages,
        all_stages=all_stages,
        splits=splits,
    )
    maps = TensorMaps(template_of_rows(g, tile), template_of_b(x, tile), GIVEN, GIVEN, GIVEN)
    rows = Rows(stride_c=g.strides[1], length=g.shape[2], channels=g.shape[1], first=first)
    launch = make_kernel(tile).prepare(splits * tiles, maps, stored, rows, grid)
    return splits * tiles, sums, launch
