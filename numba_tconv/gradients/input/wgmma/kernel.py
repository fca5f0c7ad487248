"""grad_input_wgmma: a warp-specialised wgmma kernel, on grad_output and weight in place.

grad_input is one matrix product whose depth is the weight's own order of (output channel, tap). Rows of the weight are
the operand in shared memory, unpacked. The other operand is in registers: a lane reads each position's elements from a
window of grad_output, at any stride. Each element of grad_output is fetched about once a tile.

* Producer: one warp fills a ring of stages with TMA boxes: 128 bytes of the weight's rows (operands.py), and windows of
  grad_output, whose rows may begin anywhere (producer.py).
* Consumers: two warpgroups share a tile, or take tiles in turn, so that one stores while the other multiplies. Few
  tiles are split along the depth (split.py).
* Epilogue: lanes exchange sums, so that a warp stores contiguous positions (epilogue.py).

With stride 1, k6 computes the gradient with resident weights (by_planes.py)."""

from __future__ import annotations

import math
from functools import cache, lru_cache, partial

import torch
from numba import cuda, float32, int32, int64, types, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.input.by_planes import adjoint, reads_grad_output
from numba_tconv.gradients.rung import FEWEST_CHANNELS, too_few
from numba_tconv.gradients.wgmma_ring import (
    BLOCK,
    CONSUMERS,
    LONGEST_SIGNAL,
    PRODUCTS,
    REGISTERS,
    ROW,
    THREADS,
    WgmmaGradient,
    make_loop,
    template_of_b,
    template_of_rows,
    workspace,
)
from numba_tconv.kernels.common import rows as row_copy
from numba_tconv.kernels.common import split_sums
from numba_tconv.kernels.common.rows import in_rows
from numba_tconv.kernels.common.tensor_core.rung import default_precision
from numba_tconv.kernels.common.tensor_map import LARGEST_SIZE, MAP_BYTES, MAP_WORDS, lies_in_rows, publish
from numba_tconv.ptx import (
    cp_async_bulk_tensor,
    cp_async_bulk_tensor_4d,
    device_function,
    fence_mbarrier_init,
    griddepcontrol_launch_dependents,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    opaque,
    recomputed,
    setmaxnreg,
    shared_address,
    swizzled_descriptor,
    tensormap_acquire,
    wgmma_wait,
)
from numba_tconv.runtime import device as gpu
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import GIVEN, Kernel, Prepared, alike, flat
from numba_tconv.runtime.layout import NO_GPU, Layout, room

from . import producer as rows_of_grad
from .epilogue import make_store
from .operands import make_advance, make_bits, make_fill, make_operands, make_prepare, make_start
from .split import second_stage, splits_of
from .tile import Config, choose, entry_of, place_of

# Input channels below which loads take longer than products.
SHORTEST_PRODUCT = 48
# Least share of a stage that is filled where it ends with a channel.
FULL_ENOUGH = 3 / 4


@cache
def make_kernel(config: Config) -> Kernel:
    stages, slot, w_bytes, spacing = config.stages, config.slot, config.b_bytes, config.spacing
    boxes, piece, positions, channels = config.boxes, config.piece, config.rows, config.channels
    stage_bytes, itemsize = config.stage_bytes, config.itemsize
    stride, dilation, kernel_size, sheared = config.stride, config.dilation, config.kernel_size, config.sheared
    through, clears, table_bytes, partial_sums = config.through, config.clears, config.table_bytes, config.partial
    last_tap = (kernel_size - 1) * dilation
    barriers, words, table_at, map_at = config.barriers, config.words, config.words + 8 * CONSUMERS, config.map
    in_turns, blocks = config.in_turns, config.blocks
    width, neighbours, halves, vector = config.width, 4 // itemsize, config.halves, 16 // itemsize
    entries, entry, place = config.entries, device_function(entry_of), device_function(place_of)
    operands = 4 * blocks
    all_sums, all_operands, lane_rows, all_meets = config.sums, 2 * operands, 2 * blocks, 4 * blocks
    lanes_entries = 2 if halves else 1
    all_places = 2 * PRODUCTS * lanes_entries
    turns_on = CONSUMERS if in_turns else 1  # from a warpgroup's tile to its next
    arrivals, first_row = (4, 0) if in_turns else (4 * CONSUMERS, BLOCK * blocks)
    start, advance = make_start(config), make_advance(config)
    fill, prepare, (bits_of, _) = make_fill(config), make_prepare(config), make_bits(config)
    loop, wait_for_all = make_loop(config, *make_operands(config), operands, 1, prepare=prepare), wgmma_wait(0)
    store_tile = make_store(config)
    grow, shrink = setmaxnreg(REGISTERS[0], True), setmaxnreg(REGISTERS[1], False)
    descriptor_of = device_function(swizzled_descriptor)

    @device_function
    def locate(tile, along, across, groups, splits):
        """Sample, group, part, tile along input channels and first position of a tile."""
        rest, channel_tile = uint32(tile) // uint32(across), uint32(tile) % uint32(across)
        rest, position_tile = rest // uint32(along), rest % uint32(along)
        rest, group, part = rest // uint32(groups), rest % uint32(groups), uint32(0)
        if partial_sums:
            rest, part = rest // uint32(splits), rest % uint32(splits)
        return int32(rest), int32(group), int32(part), int32(channel_tile), int32(position_tile * positions)

    def grad_input_wgmma(
        g_template, w_template, g_address, w_address, maps, grad, first, length, groups, group_rows, group_channels,
        along, across, tiles, tile_stages, shear, signal, splits,
    ):  # fmt: skip
        shared = cuda.shared.array(0, dtype=float32)
        base = int32((shared_address(shared, 0) + 1023) & -1024)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(cuda.shfl_sync(0xFFFFFFFF, thread >> 5, 0))
        full, empty = int32(base + barriers), int32(base + barriers + 8 * stages)
        product_turn = int32(base + words)
        if thread == 0:
            for z in range(stages):
                mbarrier_init(full + 8 * z, 1)
                mbarrier_init(empty + 8 * z, arrivals)
            for z in range(CONSUMERS):
                mbarrier_init(product_turn + 8 * z, 4)
            fence_mbarrier_init()
        if through:
            fill(int32(base + table_at), thread, int32(shear))
        cuda.syncthreads()
        griddepcontrol_launch_dependents()  # the next kernel's blocks begin where one of these has ended
        tile, tile_hop, tile_stages = int32(cuda.blockIdx.x), int32(cuda.gridDim.x), int32(tile_stages)

        if warp >= 4 * CONSUMERS:
            shrink()
            if warp == 4 * CONSUMERS:
                maps += int64(cuda.blockIdx.x) * (2 * MAP_BYTES)
                publish(g_template, g_address, maps, base + map_at, lane)
                publish(w_template, w_address, maps + MAP_BYTES, base + map_at, lane)
                if lane == 0:
                    tensormap_acquire(maps)
                    tensormap_acquire(maps + MAP_BYTES)
                    s, parity = int32(0), int32(1)
                    while tile < tiles:
                        sample, group, part, channel_tile, position = locate(tile, along, across, groups, splits)
                        g_row, phase, w_entry = int32(group * group_rows), int32(0), int32(0)
                        if partial_sums:
                            before, phase = start(int32(part * tile_stages))
                            g_row, w_entry = int32(g_row + before), int32(part * tile_stages * entries)
                        w_row = int32(group * group_channels + channel_tile * channels)
                        column, left = int32((position * stride + first) & -vector), tile_stages
                        while left > 0:
                            mbarrier_wait(empty + 8 * s, parity)
                            mbarrier_arrive_expect_tx(full + 8 * s, stage_bytes)
                            at = int32(base + s * slot)
                            cp_async_bulk_tensor(at, maps + MAP_BYTES, w_entry, w_row, int32(0), full + 8 * s)
                            for box in range(boxes):
                                to = int32(at + w_bytes + box * spacing)
                                begin = int32(column + box * (piece * stride))
                                if sheared > 1:
                                    cp_async_bulk_tensor_4d(to, maps, begin, int32(0), g_row, sample, full + 8 * s)
                                else:
                                    cp_async_bulk_tensor(to, maps, begin, g_row, sample, full + 8 * s)
                            w_entry = int32(w_entry + entries)
                            g_row, phase = advance(g_row, phase)
                            left, s = int32(left - 1), int32(s + 1)
                            if s == stages:
                                s, parity = int32(0), int32(parity ^ 1)
                        tile = int32(tile + tile_hop)
        else:
            grow()
            group_warp, crew = int32(warp & 3), int32(warp >> 2)
            acc = cuda.local.array(all_sums, dtype=float32)
            v = cuda.local.array(all_operands, dtype=int32)
            rows = cuda.local.array(lane_rows, dtype=int32)
            places = cuda.local.array(all_places, dtype=int32)
            phase = cuda.local.array(1, dtype=int32)
            ahead = cuda.local.array(lane_rows, dtype=int32)
            meets = cuda.local.array(all_meets, dtype=uint64)
            for z in range(lane_rows):
                m = int32(16 * group_warp + (lane >> 2) + z // 2 * BLOCK + z % 2 * 8 + first_row * crew)
                element = m % piece * stride + (int32(first) & (vector - 1))
                rows[z] = int32(base + w_bytes + m // piece * spacing + element * itemsize)
            for z in range(all_places):
                e = int32(entry(int32(z // lanes_entries), lane & 3, neighbours) + z % lanes_entries)
                e = int32(e if e < entries else 0)
                places[z] = int32(place(e, kernel_size, width, dilation, sheared, int32(shear)) * itemsize)
            first_entry = int32(entry(int32(0), lane & 3, neighbours))
            table = int32(base + table_at + first_entry * table_bytes)
            descriptor = descriptor_of(int64(base))
            s, parity, my_turn = int32(0), int32(0), int32(1 - crew)
            if in_turns and crew == 1:
                tile, s = int32(tile + tile_hop), tile_stages
            while tile < tiles:
                while s >= stages:
                    s, parity = int32(s - stages), int32(parity ^ 1)
                for z in range(all_sums):
                    acc[z] = opaque(float32(0))
                if in_turns:  # a warpgroup that ran ahead would mistake a stage's older phase for the one it waits for
                    mbarrier_wait(product_turn + 8 * crew, my_turn)
                phase[0], beside = int32(0), int32(0)
                if clears or partial_sums:
                    _, _, part, _, position = locate(tile, along, across, groups, splits)
                    if partial_sums:
                        _, begins = start(int32(part * tile_stages))
                        phase[0] = int32(begins * table_bytes)
                    if clears:
                        for z in range(lane_rows):
                            m = int32(16 * group_warp + (lane >> 2) + z // 2 * BLOCK + z % 2 * 8 + first_row * crew)
                            ahead[z] = int32((position + m) * stride + first)
                            beside |= int32(ahead[z] < 0 or ahead[z] + last_tap >= signal)
                        beside = int32(cuda.any_sync(0xFFFFFFFF, beside))
                        if beside:
                            for z in range(lane_rows):
                                tap = int32(phase[0] // table_bytes % kernel_size)
                                meets[z] = bits_of(ahead[z], tap, int32(signal))
                knows = rows, places, first_entry, table, phase, beside, ahead, meets, int32(signal)
                s, parity, last = loop(acc, v, knows, descriptor, s, parity, tile_stages, full, empty, lane == 0)
                if in_turns and lane == 0:
                    mbarrier_arrive(product_turn + 8 * (1 - crew))
                wait_for_all()
                if lane == 0:
                    mbarrier_arrive(empty + 8 * last)
                sample, group, part, channel_tile, position = locate(tile, along, across, groups, splits)
                position = int32(position + first_row * crew)
                channel = int64(group) * group_channels + channel_tile * channels
                target = (int64(sample) * (groups * group_channels) + channel) * length + position
                if partial_sums:
                    channel = ((int64(sample) * groups + group) * splits + part) * group_channels
                    target = (channel + channel_tile * channels) * length + position
                left = int32(group_channels - channel_tile * channels)
                there = int32(min(length - position, int64(positions)))
                # Recomputed, so that it takes no registers meanwhile.
                store_tile(acc, grad, target, length, left, there, group_warp, recomputed(lane))
                tile = int32(tile + turns_on * tile_hop)
                if in_turns:
                    s, my_turn = int32(s + tile_stages), int32(my_turn ^ 1)

    template, integers = types.UniTuple(types.int64, MAP_WORDS), (types.int64,)
    stored = float32 if config.partial else ELEMENTS[config.dtype].storage
    signature = (template, template, *integers * 3, flat(stored), *integers * 12)
    return Kernel("grad_input_wgmma", grad_input_wgmma, signature, THREADS, config.shared_bytes, key=repr(config))


class InputWarpgroup(WgmmaGradient):
    name = "grad_input_wgmma"
    of = "grad_input"
    idea = "Hopper's wgmma over output channels and taps: weights as they lie, windows of grad_output at any stride"

    def no_tile(self, problem, precision):
        config = choose(problem, precision)
        if config is None:
            return f"no tile fits {problem.kernel_size} taps of stride {problem.stride} and dilation {problem.dilation}"
        return "it counts tiles in 32 bits" if config.tiles(problem)[2] >= LARGEST_SIZE else None

    def unsuited(self, problem, dtype, precision, device):
        if reads_grad_output(problem):
            return "with stride 1 it is a transposed convolution, whose weights stay in shared memory"
        # With one group and few channels, planes are unsuited, too.
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
        """The configuration for a contiguous grad_output."""
        shape = problem.batch, problem.out_channels, problem.out_length
        sheared = rows_of_grad.sheared_of(Layout.contiguous(shape, dtype, NO_GPU))
        return rows_of_grad.choose_for(problem, precision or default_precision(dtype), sheared, device or gpu.H200)

    def kernels(self, config):
        others = [split_sums.make_kernel(config.dtype, True)] if config.partial else []
        others += row_copy.kernels_of(config.dtype)
        return [(make_kernel(config), config.shared_bytes), *((other, 0) for other in others)]

    def prepare(self, grad_output, weight, result, problem, config=None, precision=None):
        p, precision, device = problem, precision or default_precision(result.dtype), gpu.of(result.index)
        sheared = rows_of_grad.sheared_of(grad_output)
        own = config or rows_of_grad.choose_for(p, precision, sheared, device)

        def prepared(g, w):
            blocks, launch, second = _prepared(p, own, g.dtype, g.strides, w.shape, w.strides, device)
            partials_room = second and room((second.sums,), torch.float32, result.index)
            return launch, workspace(blocks, 1, result.index), second, partials_room

        def filled(launches, g, w, result):
            launch, maps_room, second, partials_room = launches
            maps, sums = maps_room(), partials_room() if second else result
            launch(g.data_ptr(), w.data_ptr(), maps.data_ptr(), sums)
            if second:
                second.launch(sums, w, result)  # w: there is no bias

        def fill_from_copies(grad_output, weight, result):
            g, w = grad_output, in_rows(weight.reshape(1, p.in_channels, -1))
            if own.sheared != sheared:
                g = in_rows(g) if own.sheared == 1 else g.clone(memory_format=torch.contiguous_format)
            filled(prepared(Layout.of(g), Layout.of(w)), g, w, result)

        one_row = Layout.contiguous((1, p.in_channels, math.prod(weight.shape[1:])), weight.dtype, weight.index)
        one_row = one_row._replace(offset=weight.offset)
        if not (weight.is_contiguous and lies_in_rows(one_row) and own.sheared == sheared):
            return fill_from_copies
        return partial(filled, prepared(grad_output, one_row))


@lru_cache(maxsize=1024)
def _prepared(
    problem: Problem,
    config: Config,
    dtype: torch.dtype,
    g_strides: tuple,
    w_shape: tuple,
    w_strides: tuple,
    device: gpu.Device,
) -> tuple[int, Prepared, split_sums.SecondStage | None]:
    """Blocks, the launch, and the second stage for partial sums, or None. ``g`` and ``w`` must lie in rows."""
    p = problem
    g, w = alike((p.batch, p.out_channels, p.out_length), dtype, g_strides), alike(w_shape, dtype, w_strides)
    sheared = config.sheared > 1
    g_template = rows_of_grad.template(tuple(g.shape), g_strides, config) if sheared else template_of_rows(g, config)
    along, across, tiles = config.tiles(p)
    splits = splits_of(p, config, device) if config.partial else 1
    second, sums = None, alike((p.batch, p.in_channels, p.length), dtype)
    if config.partial:
        second = second_stage(p, splits, config)
        sums = alike((second.sums,), torch.float32)
    blocks, cropped = min(tiles * splits, device.multiprocessors), max(0, p.padding - p.output_padding)
    launch = make_kernel(config).prepare(
        blocks,
        *(g_template, template_of_b(w, config), GIVEN, GIVEN, GIVEN, sums),
        *(-p.padding, p.length, p.groups, p.out_channels_per_group // config.sheared, p.in_channels_per_group),
        *(along, across, tiles * splits, config.stages_of(p) // splits),
        *(rows_of_grad.shear_of(g_strides, config), p.out_length if cropped else LONGEST_SIGNAL, splits),
    )
    return blocks, launch, second
