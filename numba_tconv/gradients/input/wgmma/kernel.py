"""grad_input_wgmma: a warp-specialised wgmma kernel, on grad_output and weight in place.

The depth is the weight's order of (output channel, tap), so the weight's rows are the shared operand, unpacked.

* Producer: one warp fills the ring by TMA: 128 bytes of the weight's rows, windows of grad_output.
* Consumers: two warpgroups, cooperative or in ping-pong.
* Epilogue: lanes exchange sums, so that a warp stores contiguous positions."""

import math
from functools import cache, lru_cache

import torch
from numba import cuda, float32, int32, int64, types, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.input.by_planes import adjoint, reads_grad_output
from numba_tconv.gradients.input.split_k import summed
from numba_tconv.gradients.rung import FEWEST_CHANNELS, too_few
from numba_tconv.gradients.wgmma_ring import (
    CONSUMERS,
    LONGEST_SIGNAL,
    MAPS,
    PRODUCTS,
    REGISTERS,
    ROW,
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
from numba_tconv.kernels.common import split_sums
from numba_tconv.kernels.common.arguments import arguments
from numba_tconv.kernels.common.pipeline import BARRIER, FULL, Pipe, release
from numba_tconv.kernels.common.rows import in_rows
from numba_tconv.kernels.common.rows import make_kernel as row_copy
from numba_tconv.kernels.common.tensor_core.rung import default_precision
from numba_tconv.kernels.common.tensor_map import LARGEST_SIZE, lies_in_rows
from numba_tconv.kernels.rung import Step
from numba_tconv.ptx import (
    device_function,
    griddepcontrol_launch_dependents,
    mbarrier_arrive,
    mbarrier_wait,
    opaque,
    recomputed,
    setmaxnreg,
    shared_address,
    swizzled_descriptor,
    wgmma_wait,
)
from numba_tconv.runtime import device as gpu
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import GIVEN, Kernel, Prepared, alike, flat
from numba_tconv.runtime.layout import NO_GPU, Layout, room

from .arguments import GradRows, Grid, Shape, Tile
from .choose import choose, choose_for, splits_of
from .epilogue import make_aim, make_store
from .operands import make_fill, make_lane, make_operands
from .producer import make_produce, shear_of, sheared_of, template
from .tile import Config

# Input channels below which loads outlast products.
SHORTEST_PRODUCT = 48
# Least filled share of stages that end with a channel.
FULL_ENOUGH = 3 / 4


def make_tile_of(config: Config):
    positions, split_k = config.rows, config.split_k

    @device_function
    def tile_of(number, grid, groups, splits):
        rest, channel_tile = uint32(number) // uint32(grid.channel_tiles), uint32(number) % uint32(grid.channel_tiles)
        rest, position_tile = rest // uint32(grid.position_tiles), rest % uint32(grid.position_tiles)
        rest, group, split = rest // uint32(groups), rest % uint32(groups), uint32(0)
        if split_k:
            rest, split = rest // uint32(splits), rest % uint32(splits)
        return Tile(int32(rest), int32(group), int32(split), int32(channel_tile), int32(position_tile * positions))

    return tile_of


@cache
def make_kernel(config: Config) -> Kernel:
    alternate, through, words = config.alternate, config.through, config.words
    table = words + BARRIER * CONSUMERS
    barriers, stages = config.barriers, config.stages
    all_sums, all_operands, all_rows = config.sums, 8 * config.blocks, 2 * config.blocks
    all_places, all_meets = 2 * PRODUCTS * (2 if config.halves else 1), 4 * config.blocks
    step = CONSUMERS if alternate else 1
    tile_of, fill, (window_of, begin_tile) = make_tile_of(config), make_fill(config), make_lane(config)
    setup = make_setup(config, 4 if alternate else 4 * CONSUMERS, turns=CONSUMERS)
    produce, aim, store = make_produce(config, tile_of), make_aim(config), make_store(config)
    mainloop, wait_for_all = make_mainloop(config, make_operands(config)), wgmma_wait(0)
    grow, shrink = setmaxnreg(REGISTERS[0], True), setmaxnreg(REGISTERS[1], False)
    descriptor_of = device_function(swizzled_descriptor)

    def grad_input_wgmma(maps, grad, shape, grid, grad_rows, splits):
        shared = cuda.shared.array(0, dtype=float32)
        base = int32((shared_address(shared, 0) + 1023) & -1024)
        number = int32(cuda.threadIdx.x)
        thread = Thread(base, int32(number & 31), int32(cuda.shfl_sync(0xFFFFFFFF, number >> 5, 0)))
        pipe = Pipe(int32(base + barriers), int32(base + barriers + BARRIER * stages), stages)
        if number == 0:
            setup(pipe, base)
        turns = int32(thread.base + words)
        if through:
            fill(int32(base + table), number, int32(grad_rows.shear))
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        tile_number, tile_step, tile_stages = int32(cuda.blockIdx.x), int32(cuda.gridDim.x), int32(grid.tile_stages)

        if thread.warp >= 4 * CONSUMERS:
            shrink()
            if thread.warp == 4 * CONSUMERS:
                produce(maps, shape, grid, splits, tile_number, pipe, thread)
        else:
            grow()
            consumer = Consumer(int32(thread.warp >> 2), int32(thread.warp & 3), thread.lane)
            sums = cuda.local.array(all_sums, dtype=float32)
            registers = cuda.local.array(all_operands, dtype=int32)
            lane_rows = cuda.local.array(all_rows, dtype=int32)
            places = cuda.local.array(all_places, dtype=int32)
            phase = cuda.local.array(1, dtype=int32)
            first = cuda.local.array(all_rows, dtype=int32)
            meets = cuda.local.array(all_meets, dtype=uint64)
            window = window_of(lane_rows, places, phase, shape, grad_rows, thread.base, consumer)
            descriptor = descriptor_of(int64(thread.base))
            stage, parity, turn_parity = int32(0), int32(FULL), int32(1 - consumer.warpgroup)
            if alternate and consumer.warpgroup == 1:
                tile_number, stage = int32(tile_number + tile_step), tile_stages
            while tile_number < grid.tiles:
                while stage >= stages:
                    stage, parity = int32(stage - stages), int32(parity ^ 1)
                for z in range(all_sums):
                    sums[z] = opaque(float32(0))
                if alternate:  # else a warpgroup ahead would take an older phase for its own
                    mbarrier_wait(turns + BARRIER * consumer.warpgroup, turn_parity)
                tile = tile_of(tile_number, grid, shape.groups, splits)
                lane = begin_tile(window, first, meets, tile, grid, shape, grad_rows, consumer)
                stage, parity, last = mainloop(sums, registers, lane, descriptor, stage, parity, tile_stages, pipe,
                                               thread.lane == 0)  # fmt: skip
                if alternate and thread.lane == 0:
                    mbarrier_arrive(turns + BARRIER * (1 - consumer.warpgroup))
                wait_for_all()
                if thread.lane == 0:
                    release(pipe, last)
                target = aim(tile_of(tile_number, grid, shape.groups, splits), shape, splits, consumer.warpgroup)
                # Recomputed: no registers meanwhile.
                store(sums, grad, target, consumer.warp, recomputed(thread.lane))
                tile_number = int32(tile_number + step * tile_step)
                if alternate:
                    stage, turn_parity = int32(stage + tile_stages), int32(turn_parity ^ 1)

    stored = float32 if config.split_k else ELEMENTS[config.dtype].storage
    signature = (MAPS, flat(stored), *map(arguments, (Shape, Grid, GradRows)), types.int64)
    return Kernel("grad_input_wgmma", grad_input_wgmma, signature, THREADS, config.shared_bytes, key=repr(config))


class InputWarpgroup(WgmmaGradient):
    name = "grad_input_wgmma"
    of = "grad_input"
    idea = "Hopper's wgmma over output channels and taps: weights as they lie, windows of grad_output at any stride"

    def no_tile(self, problem, precision):
        config = choose(problem, precision)
        if config is None:
            return f"no tile fits {problem.kernel_size} taps of stride {problem.stride} and dilation {problem.dilation}"
        return "it counts tiles in 32 bits" if config.tiles_of(problem).tiles >= LARGEST_SIZE else None

    def unsuited(self, problem, dtype, precision, device):
        if reads_grad_output(problem):
            return "with stride 1 it is a transposed convolution, whose weights stay in shared memory"
        # With one group and few channels planes are unsuited, too.
        channels, by_planes = problem.in_channels_per_group, adjoint(problem)
        few = min(by_planes.in_channels_per_group, by_planes.out_channels_per_group) < FEWEST_CHANNELS
        if channels < SHORTEST_PRODUCT and not (few and problem.groups == 1):
            return f"it is for at least {SHORTEST_PRODUCT} input channels a group, not {channels}: products are short"
        entries = problem.out_channels_per_group * problem.kernel_size
        if entries < FEWEST_CHANNELS:
            return too_few(entries)
        of_stage, row = choose(problem, precision).entries, ROW // dtype.itemsize
        if min(of_stage, entries) < FULL_ENOUGH * min(row, entries):
            return f"{problem.kernel_size} taps fill {of_stage} of a stage's {row} entries: the rest multiplies zeros"
        return None

    def config(self, problem, dtype, device=None, precision=None):
        """Assumes a contiguous grad_output."""
        sheared = sheared_of(Layout.contiguous(problem.out_shape, dtype, NO_GPU))
        return choose_for(problem, precision or default_precision(dtype), sheared, device or gpu.H200)

    def steps(self, config, problem, device=gpu.H200):
        copy, main = Step("copy", row_copy(config.dtype)), Step("main", make_kernel(config), config.shared_bytes)
        sums = [Step("add up", split_sums.make_kernel(config.dtype, True))] if config.split_k else []
        return [copy, main, *sums]

    def prepare(self, grad_output, weight, result, problem, config=None, precision=None):
        p, precision, device = problem, precision or default_precision(result.dtype), gpu.of(result.index)
        sheared = sheared_of(grad_output)
        config = config or choose_for(p, precision, sheared, device)

        def prepared(g, w):
            blocks, launch, second = _prepared(p, config, g, w, device)
            partials_room = second and room((second.sums,), torch.float32, result.index)
            maps_room = workspace(blocks, 1, result.index)

            def fill(g, w, result):
                maps, sums = maps_room(), partials_room() if second else result
                launch(g.data_ptr(), w.data_ptr(), maps.data_ptr(), sums)
                if second:
                    second.launch(sums, w, result)

            return fill

        def fill_from_copies(grad_output, weight, result):
            g, w = grad_output, in_rows(weight.reshape(1, p.in_channels, -1))
            if config.sheared != sheared:
                g = in_rows(g) if config.sheared == 1 else g.clone(memory_format=torch.contiguous_format)
            prepared(Layout.of(g), Layout.of(w))(g, w, result)

        one_row = Layout.contiguous((1, p.in_channels, math.prod(weight.shape[1:])), weight.dtype, weight.index)
        one_row = one_row._replace(offset=weight.offset)
        if not (weight.is_contiguous and lies_in_rows(one_row) and config.sheared == sheared):
            return fill_from_copies
        return prepared(grad_output, one_row)


@lru_cache(maxsize=1024)
def _prepared(
    problem: Problem, config: Config, g: Layout, w: Layout, device: gpu.Device
) -> tuple[int, Prepared, split_sums.SecondStage | None]:
    p = problem
    g_template = template(g.shape, g.strides, config) if config.sheared > 1 else template_of_rows(g, config)
    splits = splits_of(p, config, device) if config.split_k else 1
    second, sums = None, alike(p.in_shape, g.dtype)
    if config.split_k:
        second = _second_stage(p, config, splits)
        sums = alike((second.sums,), torch.float32)
    position_tiles, channel_tiles, tiles = config.tiles_of(p)
    blocks, cropped = min(tiles * splits, device.multiprocessors), max(0, p.padding - p.output_padding)
    shape = Shape(
        first=-p.padding,
        length=p.length,
        groups=p.groups,
        group_rows=p.out_channels_per_group // config.sheared,
        group_channels=p.in_channels_per_group,
    )
    grid = Grid(position_tiles, channel_tiles, tiles * splits, tile_stages=config.stages_of(p) // splits)
    grad_rows = GradRows(shear_of(g.strides, config), length=p.out_length if cropped else LONGEST_SIGNAL)
    maps = TensorMaps(g_template, template_of_b(w, config), GIVEN, GIVEN, GIVEN)
    return blocks, make_kernel(config).prepare(blocks, maps, sums, shape, grid, grad_rows, splits), second


def _second_stage(problem: Problem, config: Config, splits: int) -> split_sums.SecondStage:
    results = summed(problem)
    launch = split_sums.prepare(results, config.dtype, splits, has_bias=False, early=True)
    return split_sums.SecondStage(split_sums.partial_sums(results, splits), launch)
