"""grad_weight_wgmma: Hopper's tensor cores, the long sums split over blocks.

Idea: the sums of grad_weight run over the positions of all samples, and both operands have positions side by side in
memory, which is how wgmma wants the depth of a product. So nothing is turned around on the way: rows of x are the
operand in shared memory, swizzled by the copy engine; rows of grad_output's pairs (planes.py; with stride 1 they
are grad_output itself) are the operand in registers, where each tap reads the same row some positions further on.

* Load: one warp drives a ring of stages with two boxes each, some rows of pairs and some of x, by as many positions as
  fill 128 bytes; what lies outside of the signal the copy engine makes zeros, and in tf32 it rounds on the way.
* Multiply: two warpgroups, each with its own pairs, or, where the pairs are few, with every other stage. A lane loads
  the words of its rows that all taps need together; the next ones are loaded while the tensor cores multiply.
* Store: the sums go to a workspace as they lie in registers; a second kernel adds up the splits, in a fixed order and
  in float64, and puts them in the order of the weight (grad_weight_sum.py): equal calls give equal bits.

Recorded (H200, tf32): kb64 2.51 ms, 1.8 times as fast as torch; kb74 0.467 ms, 5.5 times, 80% of the roofline. Its
error is a third of torch's. kb64 stands at 40%, for a reason that has not been found: neither a second set of operands
in registers nor stages dealt out in turn made a difference.

A split is at most 32,768 positions long: tensor cores cut off what an addition cannot hold, so a longer sum would lose
more. Each element of x is read once for each tile along pairs and taps, each of grad_output once for each along input
channels and taps.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from numba import cuda, float32, int32, int64, types

from ..launch import Kernel, flat
from ..problem import Problem
from ..ptx import (
    SIMULATOR,
    bits_of,
    cp_async_bulk_tensor,
    device_function,
    fence_mbarrier_init,
    ld_shared,
    ld_shared_u16,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    opaque,
    prmt,
    repeated,
    setmaxnreg,
    shared_address,
    st_global_if,
    swizzled_descriptor,
    tensormap_acquire,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from . import device as gpu
from . import grad_weight_sum, planes
from .fragments import wgmma_d
from .grad_rung import FEWEST_CHANNELS, GradientRung, too_few, too_many_weights
from .grad_weight_wgmma_config import (
    CONSUMERS,
    PRODUCTS,
    REGISTERS,
    THREADS,
    Config,
    choose,
    operand_places,
    splits_of,
)
from .tensor_map import ALIGNMENT, LARGEST_SIZE, MAP_BYTES, MAP_WORDS, encode, in_rows, lies_in_rows, publish, row_bytes
from .tensor_rung import default_precision
from .tensor_tile import DTYPES

KNOWN = "tf32", "fp16", "bf16"
MOST_WEIGHTS = 1 << 20  # of 16 bits: hifigan_u2's half a million are faster than by torch, hifigan_u1's two are not
# prmt: the upper half of a word, then the lower half of the next; the lower halves of two words.
UPPER_AND_LOWER, LOWER_HALVES = 0x5432, 0x5410


def make_products(config: Config):
    """A device function: the products of one stage, for all taps, and the arrival that sets the stage before free.

    Its state: sums, operands, the addresses of the lane's rows, the bytes from there to this stage, descriptor of x,
    and the mbarrier to arrive at, or 0.
    """
    blocks, chunk, stride = config.blocks, config.tap_chunk, config.window.stride
    operands = config.operands
    entries, places = config.entries, config.places
    count, raw_count = len(entries), len(places)
    first, second = (tuple(places.index(entry[z]) for entry in entries) for z in range(2))
    entry_of = tuple(entries.index(entry) for entry in operand_places(config))
    halves = config.itemsize == 2 and stride > 1
    load_word, multiply_all, sums = ld_shared(1, int32), wgmma(config.kind, config.channels), config.channels // 2
    load_raw, joined = (ld_shared_u16, LOWER_HALVES) if halves else (load_word, UPPER_AND_LOWER)
    of_piece = PRODUCTS // config.pieces
    product_bytes, spacing = 32 * stride, config.spacing
    wait_for_older = wgmma_wait(1)

    @device_function
    def load(v, at, rows, offset):
        raw = cuda.local.array(raw_count, dtype=int32)
        for row in range(2 * blocks):
            for w in range(raw_count):
                raw[w] = load_raw(int32(rows[row] + offset + places[w]))
            for e in range(count):
                low, high = raw[first[e]], raw[second[e]]
                v[at + row * count + e] = low if first[e] == second[e] else prmt(low, high, joined)

    @device_function
    def multiply(acc, v, at, descriptor):
        wgmma_fence()
        for block in range(blocks):
            row, next_row = at + 2 * block * count, at + (2 * block + 1) * count
            for b in range(chunk):
                low, high = entry_of[2 * b], entry_of[2 * b + 1]
                multiply_all(acc, (block * chunk + b) * sums, v[row + low], v[next_row + low], v[row + high],
                             v[next_row + high], descriptor, int32(1))  # fmt: skip
        wgmma_commit()

    @device_function
    def step(k, state):
        acc, v, rows, offset, descriptor, done = state
        at = int32(k % 2 * operands)
        load(v, at, rows, int32(offset + k // of_piece * spacing + k % of_piece * product_bytes))
        multiply(acc, v, at, descriptor + 2 * k)
        wait_for_older()
        if k == 0 and done:  # by now the products of the stage before have read its x
            mbarrier_arrive(done)

    return repeated(step, PRODUCTS)


@cache
def make_kernel(config: Config) -> Kernel:
    stages, slot, x_bytes, spacing = config.stages, config.slot, config.x_bytes, config.spacing
    pieces, piece_positions = config.pieces, config.positions // config.pieces
    stage_bytes, itemsize, odd = x_bytes + pieces * config.box_bytes, config.itemsize, config.odd
    vector = 16 // itemsize
    stride, dilation, phases = config.window.stride, config.window.dilation, config.window.phases
    g_channels, lane_bytes, lane_rows = config.g_channels, config.lane_bytes, 2 * config.blocks
    positions, in_turns, blocks, chunk = config.positions, config.in_turns, config.blocks, config.tap_chunk
    rows, pairs, channels, tile_sums = config.rows, config.pairs, config.channels, config.tile_sums
    all_sums, all_operands, sums = config.sums, 2 * config.operands, config.channels // 2
    barriers, map_at, chunk_columns = config.barriers, config.map, config.tap_chunk * config.window.step
    pitch = config.width * itemsize
    every = CONSUMERS if in_turns else 1  # from a warpgroup's stage to its next
    arrivals, first_row = (4, 0) if in_turns else (4 * CONSUMERS, 64 * blocks)
    multiply_stage, wait_for_all = make_products(config), wgmma_wait(0)
    grow, shrink = setmaxnreg(REGISTERS[0], True), setmaxnreg(REGISTERS[1], False)
    descriptor_of, place = device_function(swizzled_descriptor), device_function(wgmma_d)
    store_pair = st_global_if(2)

    def grad_weight_wgmma(
        g_template, x_template, g_address, x_address, maps, partials, first, group_rows, group_channels,
        pair_tiles, channel_tiles, tap_chunks, tiles, sample_stages, all_stages, splits,
    ):  # fmt: skip
        shared = cuda.shared.array(0, dtype=float32)
        base = int32((shared_address(shared, 0) + 1023) & -1024)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(cuda.shfl_sync(0xFFFFFFFF, thread >> 5, 0))
        full, empty = int32(base + barriers), int32(base + barriers + 8 * stages)
        if thread == 0:
            for s in range(stages):
                mbarrier_init(full + 8 * s, 1)
                mbarrier_init(empty + 8 * s, arrivals)
            fence_mbarrier_init()
        cuda.syncthreads()
        split = int64(cuda.blockIdx.x) // tiles
        tile = int32(int64(cuda.blockIdx.x) - split * tiles)
        rest, channel_tile = tile // int32(channel_tiles), tile % int32(channel_tiles)
        rest, pair_tile = rest // int32(pair_tiles), rest % int32(pair_tiles)
        group, tap_chunk = rest // int32(tap_chunks), rest % int32(tap_chunks)
        g_first = int32(first + tap_chunk * chunk_columns * stride)
        count = int32((all_stages - split + splits - 1) // splits)

        if warp >= 4 * CONSUMERS:
            shrink()
            if warp == 4 * CONSUMERS:
                maps += int64(cuda.blockIdx.x) * (2 * MAP_BYTES)
                publish(g_template, g_address, maps, base + map_at, lane)
                publish(x_template, x_address, maps + MAP_BYTES, base + map_at, lane)
                if lane == 0:
                    tensormap_acquire(maps)
                    tensormap_acquire(maps + MAP_BYTES)
                    g_row = int32(group * group_rows + pair_tile * g_channels)
                    x_row = int32(group * group_channels + channel_tile * channels)
                    # Splits take stages in turn, so that at any time all blocks read the same stretch of the signals.
                    sample, hop = int32(split // sample_stages), int32(splits // sample_stages)
                    position = int32((split - sample * sample_stages) * positions)
                    step = int32((splits - hop * sample_stages) * positions)
                    end = int32(sample_stages * positions)
                    s, parity, left = int32(0), int32(1), count
                    while left > 0:
                        mbarrier_wait(empty + 8 * s, parity)
                        mbarrier_arrive_expect_tx(full + 8 * s, stage_bytes)
                        at = int32(base + s * slot)
                        cp_async_bulk_tensor(at, maps + MAP_BYTES, position, x_row, sample, full + 8 * s)
                        for piece in range(pieces):
                            column = int32((position + piece * piece_positions) * stride + (g_first & -vector))
                            box = int32(at + x_bytes + piece * spacing)
                            cp_async_bulk_tensor(box, maps, column, g_row, sample, full + 8 * s)
                        position, sample = int32(position + step), int32(sample + hop)
                        if position >= end:
                            position, sample = int32(position - end), int32(sample + 1)
                        left, s = int32(left - 1), int32(s + 1)
                        if s == stages:
                            s, parity = int32(0), int32(parity ^ 1)
        else:
            grow()
            group_warp, crew = int32(warp & 3), int32(warp >> 2)
            acc = cuda.local.array(all_sums, dtype=float32)
            v = cuda.local.array(all_operands, dtype=int32)
            for z in range(all_sums):
                acc[z] = opaque(float32(0))
            lanes_rows = cuda.local.array(lane_rows, dtype=int32)
            for z in range(lane_rows):  # rows that mean nothing read what the last one reads
                m = int32(16 * group_warp + (lane >> 2) + z // 2 * 64 + z % 2 * 8 + first_row * crew)
                m = int32(min(m, pairs - 1))
                element = m % phases * dilation + (g_first & (vector - 1)) - odd
                row_at = m // phases * pitch + element * itemsize
                lanes_rows[z] = int32(base + x_bytes + row_at + (lane & 3) * lane_bytes)
            descriptor = descriptor_of(int64(base))
            s, parity, before = int32(crew if in_turns else 0), int32(0), int32(-1)
            left = int32(count - s)
            while left > 0:
                mbarrier_wait(full + 8 * s, parity)
                done = int32(empty + 8 * before) if before >= 0 and lane == 0 else int32(0)
                state = acc, v, lanes_rows, int32(s * slot), descriptor + ((s * slot) >> 4), done
                multiply_stage(int32(0), state)
                before, left, s = s, int32(left - every), int32(s + every)
                if s >= stages:
                    s, parity = int32(s - stages), int32(parity ^ 1)
            wait_for_all()

            slots = split * CONSUMERS + crew if in_turns else split
            target = (slots * tiles + tile) * tile_sums
            both = cuda.local.array(2, dtype=int32)
            for block in range(blocks):
                for b in range(chunk):
                    for z in range(0, sums, 2):
                        m, n = place(group_warp, lane, z)
                        at = target + (b * rows + first_row * crew + 64 * block + m) * channels + n
                        both[0] = bits_of(acc[(block * chunk + b) * sums + z])
                        both[1] = bits_of(acc[(block * chunk + b) * sums + z + 1])
                        store_pair(True, partials, at, both)

    template, integers = types.UniTuple(types.int64, MAP_WORDS), (types.int64,)
    signature = (template, template, *integers * 3, flat(float32), *integers * 10)
    return Kernel("grad_weight_wgmma", grad_weight_wgmma, signature, THREADS, config.shared_bytes, key=repr(config))


class WeightWarpgroup(GradientRung):
    name = "grad_weight_wgmma"
    of = "grad_weight"
    tensor_cores = True
    idea = "Hopper's wgmma over positions, split over blocks: both operands as they lie in memory, boxes in a ring"
    exact_cc = (9, 0)

    def supports(self, problem, dtype, precision):
        if SIMULATOR:
            return "the CUDA simulator has no tensor cores"
        if precision not in KNOWN:
            return f"it multiplies on tensor cores, in {', '.join(KNOWN)}, not in {precision}"
        if dtype != DTYPES[precision]:
            return f"{precision} is no precision of {str(dtype).removeprefix('torch.')}"
        if max(problem.batch, problem.length, problem.out_length, problem.in_channels) >= LARGEST_SIZE:
            return "it counts samples, channels and positions in 32 bits"
        if planes.pairs_of(problem) * problem.groups >= LARGEST_SIZE:
            return "it counts pairs of output channels and phases in 32 bits"
        if choose(problem, precision, True) is None:
            return f"no tile fits {problem.taps.step} positions between two taps"
        return None

    def unsuited(self, problem, dtype, precision, device):
        fewest = min(problem.in_channels_per_group, planes.pairs_of(problem))
        if fewest < FEWEST_CHANNELS:
            return too_few(fewest)
        return too_many_weights(problem, dtype, MOST_WEIGHTS)

    def config(self, problem, dtype, device=None, precision=None):
        """That of the planes, or None where grad_output is read as it lies, and its own; of contiguous tensors."""
        aligned = problem.out_length * dtype.itemsize % ALIGNMENT == 0
        return _config(problem, precision or default_precision(dtype), aligned)

    def kernels(self, config):
        apart, own = config
        found = [(make_kernel(own), own.shared_bytes), (grad_weight_sum.make_kernel(DTYPES[own.precision]), 0)]
        return found if apart is None else [*found, (planes.make_kernel(apart), 0)]

    def run(self, grad_output, x, result, problem, config=None, precision=None):
        p, device = problem, gpu.of(result.device.index)
        precision = precision or default_precision(result.dtype)
        apart, own = config or _config(p, precision, lies_in_rows(grad_output))
        x, g = in_rows(x), grad_output if apart is None else planes.make_planes(grad_output, p)
        first, rows = (-p.padding, p.out_channels_per_group) if apart is None else (0, planes.pairs_of(p))
        splits = splits_of(p, own, device)
        tiles, sums = own.blocks_of(p), splits * (CONSUMERS if own.in_turns else 1)
        partials = torch.empty(sums * tiles * own.tile_sums, dtype=torch.float32, device=x.device)
        maps = torch.empty(splits * tiles * 2 * MAP_BYTES, dtype=torch.uint8, device=x.device)
        taps, pair_tiles, channel_tiles = own.tiles(p)
        make_kernel(own).launch(
            splits * tiles,
            *(_template(g.shape, g.stride(), own, False), _template(x.shape, x.stride(), own, True)),
            *(g.data_ptr(), x.data_ptr(), maps.data_ptr(), partials, first, rows, p.in_channels_per_group),
            *(pair_tiles, channel_tiles, taps, tiles, *own.stages_of(p), splits),
        )
        grad_weight_sum.add_up(partials, result, p, own, sums)


@lru_cache(maxsize=1024)
def _config(problem: Problem, precision: str, in_rows: bool):
    """As ``WeightWarpgroup.config``; ``in_rows``: the copy engine can fetch rows of grad_output as they lie."""
    direct = choose(problem, precision, False) if in_rows else None
    if direct:
        return None, direct
    return planes.make_config(problem, DTYPES[precision]), choose(problem, precision, True)


@lru_cache(maxsize=1024)
def _template(shape: tuple, strides: tuple, config: Config, swizzled: bool) -> tuple[int, ...]:
    """The map of x (``swizzled``), or of grad_output or its planes."""
    box = (config.positions, config.channels, 1) if swizzled else (config.width, config.g_channels, 1)
    n_bytes, c_bytes = row_bytes(shape, strides, config.itemsize)
    return encode(config.precision, shape[::-1], (c_bytes, n_bytes), box, swizzled)
