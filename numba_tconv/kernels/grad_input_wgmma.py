"""grad_input_wgmma: Hopper's tensor cores, on grad_output and weight as they lie in memory.

Idea: position i of the input meets grad_output at ``i*stride - padding + k*dilation``, so grad_input is one matrix
product whose depth is the pairs of an output channel and a tap, in the order in which the weight has them. The weight's
rows are therefore the operand in shared memory without any packing; the other operand lies in registers, where a lane
reads each position's elements out of a window of grad_output, whatever the stride. Neighbouring positions share
most of a window, so each element of grad_output is fetched about once a tile.

* Load: one warp drives a ring of stages: some output channels' taps for the input channels of the tile, which the copy
  engine swizzles, and boxes of those channels' windows; zeros stand for what lies outside of the signal.
* Multiply: two warpgroups, with positions of their own of one tile, or with tiles in turn, so that one stores while the
  other multiplies.
* Store: neighbouring lanes exchange sums, so that each stores four positions of one channel; a warp's sums of one
  channel lie side by side.

Recorded (H200, tf32): hifigan_u3 0.166 ms, 2.4 times as fast as torch and 1.9 times as grad_input_planes; bf16: 0.134.

Where the stride is 1, grad_input is a transposed convolution, which k6 computes with weights that stay in shared memory
(grad_input_planes.py).
"""

from __future__ import annotations

import math
from functools import cache, lru_cache, partial

import torch
from numba import cuda, float32, int32, int64, types, uint32, uint64

from ..elements import ELEMENTS
from ..launch import GIVEN, Kernel, Prepared, alike, flat
from ..layout import Layout
from ..problem import Problem
from ..ptx import (
    bits_of,
    cp_async_bulk_tensor,
    device_function,
    fence_mbarrier_init,
    float_of,
    griddepcontrol_launch_dependents,
    ld_shared,
    ld_shared_u16,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    opaque,
    pack_bf16,
    pack_f16,
    recomputed,
    repeated,
    setmaxnreg,
    shared_address,
    st_global_if,
    swizzled_descriptor,
    tensormap_acquire,
    wgmma,
    wgmma_wait,
)
from . import device as gpu
from .fragments import wgmma_d
from .grad_input_planes import reads_grad_output
from .grad_input_wgmma_config import Config, choose, entry_of, place_of
from .grad_ring import (
    BLOCK,
    CONSUMERS,
    PRODUCTS,
    REGISTERS,
    ROW,
    THREADS,
    WgmmaGradient,
    make_loop,
    templates,
    workspace,
)
from .grad_rung import FEWEST_CHANNELS, too_few
from .tensor_map import LARGEST_SIZE, MAP_BYTES, MAP_WORDS, in_rows, lies_in_rows, publish
from .tensor_rung import default_precision
from .tensor_tile import DTYPES

# Input channels, below which loads take longer than products: kb79's 32 take 1.12 ms, by planes 0.62 (H200, tf32).
SHORTEST_PRODUCT = 48
FULL_ENOUGH = 3 / 4  # of a stage: encodec_u2's 20 of 32 take 0.25 ms, by planes 0.21 (H200, tf32)


def make_operands(config: Config):
    """Two device functions, for the main loop: load the operands of one product, and multiply them.

    A lane knows the addresses of its positions in stage 0, where its entries lie from there, and its first entry.
    """
    blocks, sums, entries = config.blocks, config.channels // 2, config.entries
    neighbours, halves = 4 // config.itemsize, config.halves
    lanes_entries = 2 if halves else 1  # places of a register
    entry_at = device_function(entry_of)
    load_word, multiply_all = ld_shared(1, int32), wgmma(config.kind, config.channels)
    masked = entries * config.itemsize < ROW  # the rest of a row of weights is the next channel's

    @device_function
    def load_register(row, places, at, entry):
        """The elements of a position (``row``) for the lane's entries from ``at`` on; zero beyond the last entry."""
        if halves:
            low, high = ld_shared_u16(int32(row + places[at])), ld_shared_u16(int32(row + places[at + 1]))
            if masked:
                low = low if entry < entries else int32(0)
                high = high if entry + 1 < entries else int32(0)
            return low | high << 16
        value = load_word(int32(row + places[at]))
        if masked:
            value = value if entry < entries else int32(0)
        return value

    @device_function
    def load(k, v, at, lane, offset):
        rows, places, lane_entry = lane
        for half in range(2):
            entry = int32(lane_entry + entry_at(int32(2 * k + half), int32(0), neighbours))
            for row in range(2 * blocks):
                z = at + row // 2 * 4 + 2 * half + row % 2
                v[z] = load_register(int32(rows[row] + offset), places, (2 * k + half) * lanes_entries, entry)

    @device_function
    def multiply(acc, v, at, descriptor):
        for block in range(blocks):
            z = at + 4 * block
            multiply_all(acc, block * sums, v[z], v[z + 1], v[z + 2], v[z + 3], descriptor, int32(1))

    return load, multiply


def make_store(config: Config):
    """A device function: a warpgroup's sums into grad_input.

    ``target``: the element of the tile's first position and channel; ``length``: elements from a channel to the next;
    ``left``, ``positions``: channels and positions that exist from there on.
    """
    blocks, sums, halves = config.blocks, config.channels // 2, config.itemsize == 2
    element, of_block = ELEMENTS[DTYPES[config.precision]], sums // 4
    store, place, store_words = element.store, device_function(wgmma_d), st_global_if(2 if halves else 4)
    pack = pack_f16 if config.precision == "fp16" else pack_bf16

    @device_function
    def gathered(low, high, lane, distance):
        """Of two sums of this lane's, and of the same two of the lane at ``distance``: the two low ones, or, for the
        later lane, the two high ones; the earlier lane's first."""
        later = lane & distance
        other = float_of(cuda.shfl_xor_sync(0xFFFFFFFF, bits_of(low if later else high), distance))
        return (other if later else low), (high if later else other)

    @device_function
    def store_four(k, state):
        """Sums 4*k to 4*k + 3: columns n and n + 1 of rows m and m + 8. Four lanes of neighbouring positions exchange
        them, so that each has four positions of one channel; those of the same channel store 16 side by side."""
        acc, grad, at, eight, left, positions, lane = state
        z, words = 4 * k, cuda.local.array(4, dtype=int32)
        a0, a1 = gathered(acc[z], acc[z + 2], lane, 4)
        b0, b1 = gathered(acc[z + 1], acc[z + 3], lane, 4)
        v0, v2 = gathered(a0, b0, lane, 8)
        v1, v3 = gathered(a1, b1, lane, 8)
        if halves:
            words[0], words[1] = pack(v0, v1), pack(v2, v3)
        else:
            words[0], words[1], words[2], words[3] = bits_of(v0), bits_of(v1), bits_of(v2), bits_of(v3)
        exists = k % of_block * 8 < left and k // of_block * BLOCK < positions
        store_words(exists, grad, at + k % of_block * eight + k // of_block * BLOCK, words)

    @device_function
    def store_one(z, state):
        acc, grad, target, length, left, positions, group_warp, lane = state
        m, n = place(group_warp, lane, z % sums)
        m = int32(m + z // sums * BLOCK)
        if n < left and m < positions:
            grad[uint64(target + n * length + m)] = store(acc[z])

    store_fours, store_ones = repeated(store_four, blocks * of_block), repeated(store_one, blocks * sums)

    @device_function
    def store_tile(acc, grad, target, length, left, positions, group_warp, lane):
        if (length & 3) == 0:
            m, n = place(group_warp, lane & 3, 0)
            m, n = int32(m + (lane & 4) * 2 + (lane >> 4) * 4), int32(n + ((lane >> 3) & 1))
            at = target + n * length + m
            store_fours(int32(0), (acc, grad, at, 8 * length, int32(left - n), int32(positions - m), lane))
        else:
            store_ones(int32(0), (acc, grad, target, length, left, positions, group_warp, lane))

    return store_tile


@cache
def make_kernel(config: Config) -> Kernel:
    stages, slot, w_bytes, spacing = config.stages, config.slot, config.b_bytes, config.spacing
    boxes, piece, positions, channels = config.boxes, config.piece, config.rows, config.channels
    stage_bytes, itemsize = config.stage_bytes, config.itemsize
    stride, dilation, kernel_size, g_channels = config.stride, config.dilation, config.kernel_size, config.g_channels
    barriers, words, map_at = config.barriers, config.words, config.map
    in_turns, blocks = config.in_turns, config.blocks
    width, neighbours, halves, vector = config.width, 4 // itemsize, config.halves, 16 // itemsize
    entries, entry, place = config.entries, device_function(entry_of), device_function(place_of)
    operands = 4 * blocks
    all_sums, all_operands, lane_rows = config.sums, 2 * operands, 2 * blocks
    lanes_entries = 2 if halves else 1
    all_places = 2 * PRODUCTS * lanes_entries
    turns_on = CONSUMERS if in_turns else 1  # from a warpgroup's tile to its next
    arrivals, first_row = (4, 0) if in_turns else (4 * CONSUMERS, BLOCK * blocks)
    loop, wait_for_all = make_loop(config, *make_operands(config), operands, 1), wgmma_wait(0)
    store_tile = make_store(config)
    grow, shrink = setmaxnreg(REGISTERS[0], True), setmaxnreg(REGISTERS[1], False)
    descriptor_of = device_function(swizzled_descriptor)

    @device_function
    def locate(tile, along, across, groups):
        """Sample, group, tile along input channels and first position of a tile."""
        rest, channel_tile = uint32(tile) // uint32(across), uint32(tile) % uint32(across)
        rest, position_tile = rest // uint32(along), rest % uint32(along)
        sample, group = rest // uint32(groups), rest % uint32(groups)
        return int32(sample), int32(group), int32(channel_tile), int32(position_tile * positions)

    def grad_input_wgmma(
        g_template, w_template, g_address, w_address, maps, grad, first, length, groups, group_rows, group_channels,
        along, across, tiles, tile_stages,
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
        cuda.syncthreads()
        griddepcontrol_launch_dependents()  # blocks of the next kernel begin where one of these has ended
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
                        sample, group, channel_tile, position = locate(tile, along, across, groups)
                        g_row, w_entry = int32(group * group_rows), int32(0)
                        w_row = int32(group * group_channels + channel_tile * channels)
                        column, left = int32((position * stride + first) & -vector), tile_stages
                        while left > 0:
                            mbarrier_wait(empty + 8 * s, parity)
                            mbarrier_arrive_expect_tx(full + 8 * s, stage_bytes)
                            at = int32(base + s * slot)
                            cp_async_bulk_tensor(at, maps + MAP_BYTES, w_entry, w_row, int32(0), full + 8 * s)
                            for box in range(boxes):
                                to = int32(at + w_bytes + box * spacing)
                                cp_async_bulk_tensor(to, maps, int32(column + box * (piece * stride)), g_row, sample,
                                                     full + 8 * s)  # fmt: skip
                            w_entry, g_row = int32(w_entry + entries), int32(g_row + g_channels)
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
            for z in range(lane_rows):
                m = int32(16 * group_warp + (lane >> 2) + z // 2 * BLOCK + z % 2 * 8 + first_row * crew)
                element = m % piece * stride + (int32(first) & (vector - 1))
                rows[z] = int32(base + w_bytes + m // piece * spacing + element * itemsize)
            for z in range(all_places):
                e = int32(entry(int32(z // lanes_entries), lane & 3, neighbours) + z % lanes_entries)
                e = int32(e if e < entries else 0)
                places[z] = int32(place(e, kernel_size, width, dilation) * itemsize)
            knows = rows, places, int32(entry(int32(0), lane & 3, neighbours))
            descriptor = descriptor_of(int64(base))
            s, parity, my_turn = int32(0), int32(0), int32(1 - crew)
            if in_turns and crew == 1:
                tile, s = int32(tile + tile_hop), tile_stages
            while tile < tiles:
                while s >= stages:
                    s, parity = int32(s - stages), int32(parity ^ 1)
                for z in range(all_sums):
                    acc[z] = opaque(float32(0))
                if in_turns:  # a warpgroup that ran ahead would take a stage's older phase for the one it waits for
                    mbarrier_wait(product_turn + 8 * crew, my_turn)
                s, parity, last = loop(acc, v, knows, descriptor, s, parity, tile_stages, full, empty, lane == 0)
                if in_turns and lane == 0:
                    mbarrier_arrive(product_turn + 8 * (1 - crew))
                wait_for_all()
                if lane == 0:
                    mbarrier_arrive(empty + 8 * last)
                sample, group, channel_tile, position = locate(tile, along, across, groups)
                position = int32(position + first_row * crew)
                channel = int64(group) * group_channels + channel_tile * channels
                target = (int64(sample) * (groups * group_channels) + channel) * length + position
                left = int32(group_channels - channel_tile * channels)
                there = int32(min(length - position, int64(positions)))
                # What follows from the lane is not worth registers while the next tile is multiplied.
                store_tile(acc, grad, target, length, left, there, group_warp, recomputed(lane))
                tile = int32(tile + turns_on * tile_hop)
                if in_turns:
                    s, my_turn = int32(s + tile_stages), int32(my_turn ^ 1)

    template, integers = types.UniTuple(types.int64, MAP_WORDS), (types.int64,)
    stored = flat(ELEMENTS[DTYPES[config.precision]].storage)
    signature = (template, template, *integers * 3, stored, *integers * 9)
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
        if (channels := problem.in_channels_per_group) < SHORTEST_PRODUCT:
            return f"it is for at least {SHORTEST_PRODUCT} input channels a group, not {channels}: products are short"
        entries = problem.out_channels_per_group * problem.kernel_size
        if entries < FEWEST_CHANNELS:
            return too_few(entries)
        of_stage, row = choose(problem, precision).entries, ROW // dtype.itemsize
        if min(of_stage, entries) < FULL_ENOUGH * min(row, entries):
            return f"{problem.kernel_size} taps fill {of_stage} of a stage's {row} entries: the rest multiplies zeros"
        return None

    def config(self, problem, dtype, device=None, precision=None):
        return choose(problem, precision or default_precision(dtype))

    def kernels(self, config):
        return [(make_kernel(config), config.shared_bytes)]

    def prepare(self, grad_output, weight, result, problem, config=None, precision=None):
        p, precision, device = problem, precision or default_precision(result.dtype), gpu.of(result.index)

        def prepared(g, w):
            blocks, launch = _prepared(p, config, precision, g.dtype, g.strides, w.shape, w.strides, device)
            return launch, workspace(blocks, 1, result.index)

        def filled(launches, g, w, result):
            launch, maps_room = launches
            maps = maps_room()
            launch(g.data_ptr(), w.data_ptr(), maps.data_ptr(), result)

        def fill_from_copies(grad_output, weight, result):
            g, w = in_rows(grad_output), in_rows(weight.reshape(1, p.in_channels, -1))
            filled(prepared(Layout.of(g), Layout.of(w)), g, w, result)

        one_row = Layout.contiguous((1, p.in_channels, math.prod(weight.shape[1:])), weight.dtype, weight.index)
        one_row = one_row._replace(offset=weight.offset)
        if not (weight.is_contiguous and lies_in_rows(one_row) and lies_in_rows(grad_output)):
            return fill_from_copies
        return partial(filled, prepared(grad_output, one_row))


@lru_cache(maxsize=1024)
def _prepared(
    problem: Problem,
    config: Config | None,
    precision: str,
    dtype: torch.dtype,
    g_strides: tuple,
    w_shape: tuple,
    w_strides: tuple,
    device: gpu.Device,
) -> tuple[int, Prepared]:
    """Blocks, and the launch; g and w as they lie in rows."""
    p, config = problem, config or choose(problem, precision)
    g, w = alike((p.batch, p.out_channels, p.out_length), dtype, g_strides), alike(w_shape, dtype, w_strides)
    along, across, tiles = config.tiles(p)
    blocks = min(tiles, device.multiprocessors)
    launch = make_kernel(config).prepare(
        blocks,
        *(*templates(g, w, config), GIVEN, GIVEN, GIVEN, alike((p.batch, p.in_channels, p.length), dtype)),
        *(-p.padding, p.length, p.groups, p.out_channels_per_group, p.in_channels_per_group),
        *(along, across, tiles, config.stages_of(p)),
    )
    return blocks, launch
