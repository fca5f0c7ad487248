"""grad_weight_wgmma: a warp-specialised wgmma kernel, its long sums split over blocks.

The sums run over positions, which are contiguous in both operands, as wgmma wants its depth. Rows of x are the operand
in shared memory. grad_output is the operand in registers: a lane reads the elements that meet its positions, at any
stride, and each tap reads the same row some positions on. Where rows of grad_output do not suit the copy engine or a
tile, gradients/planes.py separates the phases first.

* Producer: one warp fills a ring of stages with TMA boxes: 128 bytes of x's rows and the rows of grad_output that meet
  them. The copy engine puts zeros outside of the signal and rounds to TF32.
* Consumers: two warpgroups with pairs of their own, or, with few pairs, stages in turn. A lane loads words for all taps
  together. With ``by_taps`` each tap has its own rows: more loads, but no products of missing taps.
* Store: a second kernel adds up the splits in a fixed order, in float64 (sum.py): equal calls give equal bits. Whole
  sums go directly into the gradient (epilogue.py).

Shared memory limits a tile, so registers go to sums first, then to a second set of operands. Tensor cores truncate when
they add, so a split has at most 32,768 positions."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import torch
from numba import cuda, float32, int32, int64, types

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients import planes
from numba_tconv.gradients.rung import FEWEST_CHANNELS, too_few
from numba_tconv.gradients.wgmma_ring import (
    BLOCK,
    CONSUMERS,
    PRODUCTS,
    REGISTERS,
    THREADS,
    WgmmaGradient,
    as_it_came,
    make_loop,
    template_of_b,
    template_of_rows,
    workspace,
)
from numba_tconv.kernels.common import rows as row_copy
from numba_tconv.kernels.common.rows import in_rows
from numba_tconv.kernels.common.tensor_core.fragments import wgmma_d
from numba_tconv.kernels.common.tensor_core.rung import default_precision
from numba_tconv.kernels.common.tensor_map import (
    ALIGNMENT,
    MAP_BYTES,
    MAP_WORDS,
    lies_in_rows,
    make_publish,
    publish,
    rows_alike,
)
from numba_tconv.ptx import (
    bits_of,
    cp_async_bulk_tensor,
    device_function,
    fence_mbarrier_init,
    ld_shared,
    ld_shared_u16,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    opaque,
    prmt,
    setmaxnreg,
    shared_address,
    st_global_if,
    st_shared_b64,
    swizzled_descriptor,
    wgmma,
    wgmma_wait,
)
from numba_tconv.runtime import device as gpu
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import GIVEN, Kernel, Prepared, flat
from numba_tconv.runtime.kernel import alike as tensor_alike
from numba_tconv.runtime.layout import Layout, room

from . import epilogue as grad_weight_direct
from . import sum as grad_weight_sum
from .clear import BARRIER, NOT_MINE, make_clear
from .split import filling, filling_planes, splits_of
from .tile import Config, choose, operand_places

CONTIGUOUS = torch.contiguous_format
# prmt: the upper half of a word and the lower half of the next; the lower halves of two words.
UPPER_AND_LOWER, LOWER_HALVES = 0x5432, 0x5410


def make_operands(config: Config):
    """Two device functions for the mainloop: load the operands of one product for all taps, and multiply them.

    The first part of a lane's state is the addresses of its rows in stage 0."""
    blocks, chunk, stride = config.blocks, config.tap_chunk, config.window.stride
    entries, places = config.entries, config.places
    count, raw_count = len(entries), len(places)
    first, second = (tuple(places.index(entry[z]) for entry in entries) for z in range(2))
    entry_of = tuple(entries.index(entry) for entry in operand_places(config))
    halves = config.itemsize == 2 and stride > 1
    load_word, multiply_all, sums = ld_shared(1, int32), wgmma(config.kind, config.channels), config.channels // 2
    load_raw, joined = (ld_shared_u16, LOWER_HALVES) if halves else (load_word, UPPER_AND_LOWER)
    of_piece = PRODUCTS // config.pieces
    product_bytes, spacing = 32 * stride, config.spacing

    @device_function
    def load(k, v, at, lane, offset):
        rows, raw = lane[0], cuda.local.array(raw_count, dtype=int32)
        offset = int32(offset + k // of_piece * spacing + k % of_piece * product_bytes)
        for row in range(2 * blocks):
            for w in range(raw_count):
                raw[w] = load_raw(int32(rows[row] + offset + places[w]))
            for e in range(count):
                low, high = raw[first[e]], raw[second[e]]
                v[at + row * count + e] = low if first[e] == second[e] else prmt(low, high, joined)

    @device_function
    def multiply(acc, v, at, descriptor):
        for block in range(blocks):
            row, next_row = at + 2 * block * count, at + (2 * block + 1) * count
            for b in range(chunk):
                low, high = entry_of[2 * b], entry_of[2 * b + 1]
                multiply_all(acc, (block * chunk + b) * sums, v[row + low], v[next_row + low], v[row + high],
                             v[next_row + high], descriptor, int32(1))  # fmt: skip

    return load, multiply


def make_begin(config: Config):
    """A device function of the tile along pairs: the output channel, of the first set, with which its boxes begin, and
    the channel's pair that is the tile's first."""
    by_taps, g_channels, pairs = config.by_taps, config.g_channels, config.pairs
    phases, alike = config.window.phases, config.alike

    @device_function
    def begin_of(pair_tile):
        if not by_taps:
            return int32(pair_tile * g_channels), int32(0)
        first = int32(pair_tile * pairs)
        channel = int32(first // (phases * alike) * alike)
        return channel, int32(first - channel * phases)

    return begin_of


@cache
def make_kernel(config: Config) -> Kernel:
    stages, slot, x_bytes, spacing = config.stages, config.slot, config.b_bytes, config.spacing
    alike, pieces, piece_positions = config.alike, config.pieces, config.positions // config.pieces
    stage_bytes, itemsize, odd, vector = config.stage_bytes, config.itemsize, config.odd, 16 // config.itemsize
    stride, dilation, phases = config.window.stride, config.window.dilation, config.window.phases
    lane_bytes, lane_rows = config.lane_bytes, 2 * config.blocks
    positions, in_turns, blocks, chunk = config.positions, config.in_turns, config.blocks, config.tap_chunk
    rows, pairs, channels, tile_sums = config.rows, config.pairs, config.channels, config.tile_sums
    all_sums, all_operands, sums = config.sums, config.sets * config.operands, config.channels // 2
    barriers, flags_at, map_at = config.barriers, config.words, config.map
    clears, chunk_columns = config.clears > 0, config.tap_chunk * config.window.step
    all_starts = lane_rows if clears else 1
    pitch = config.width * itemsize
    every = CONSUMERS if in_turns else 1  # from a warpgroup's stage to its next
    arrivals, first_row = (4, 0) if in_turns else (4 * CONSUMERS, BLOCK * blocks)
    prepare = make_clear(config) if clears else as_it_came
    loop = make_loop(config, *make_operands(config), config.operands, every, config.sets, prepare)
    wait_for_all, (publish_sets, acquire_sets) = wgmma_wait(0), make_publish(itemsize)
    grow, shrink = setmaxnreg(REGISTERS[0], True), setmaxnreg(REGISTERS[1], False)
    descriptor_of, place = device_function(swizzled_descriptor), device_function(wgmma_d)
    begin_of = make_begin(config)
    store_pair, store_sums = st_global_if(2), grad_weight_direct.make_store(config) if config.direct else None
    direct, out_storage = config.direct, ELEMENTS[DTYPES[config.precision]].storage if config.direct else float32

    def grad_weight_wgmma(
        g_template, x_template, g_address, x_address, maps, result, g_stride_c, g_length, g_rows, first, group_rows,
        group_channels, pair_tiles, channel_tiles, tap_chunks, tiles, sample_stages, all_stages, splits,
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
                maps += int64(cuda.blockIdx.x) * ((alike + 1) * MAP_BYTES)
                x_map = int64(maps + alike * MAP_BYTES)
                publish_sets(g_template, maps, base + map_at, alike, g_address, 0, g_stride_c, g_length, g_rows, lane)
                publish(x_template, x_address, x_map, base + map_at, lane)
                acquire_sets(maps, alike + 1, lane)
                if lane == 0:
                    g_channel, _ = begin_of(pair_tile)
                    g_row = int32(group * group_rows + g_channel) // alike
                    x_row = int32(group * group_channels + channel_tile * channels)
                    # Splits take stages in turn, so all blocks read the same stretch at a time.
                    sample, hop = int32(split // sample_stages), int32(splits // sample_stages)
                    position = int32((split - sample * sample_stages) * positions)
                    step = int32((splits - hop * sample_stages) * positions)
                    end = int32(sample_stages * positions)
                    s, parity, left = int32(0), int32(1), count
                    while left > 0:
                        mbarrier_wait(empty + 8 * s, parity)
                        if clears:
                            st_shared_b64(base + flags_at + 8 * s, int64(position == 0))
                        mbarrier_arrive_expect_tx(full + 8 * s, stage_bytes)
                        at = int32(base + s * slot)
                        cp_async_bulk_tensor(at, x_map, position, x_row, sample, full + 8 * s)
                        for box in range(alike * pieces):
                            early = (box // pieces * int32(g_stride_c)) & (vector - 1)
                            column = int32((position + box % pieces * piece_positions) * stride
                                           + ((g_first + early) & -vector))  # fmt: skip
                            cp_async_bulk_tensor(int32(at + x_bytes + box * spacing), maps + box // pieces * MAP_BYTES,
                                                 column, g_row, sample, full + 8 * s)  # fmt: skip
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
            starts = cuda.local.array(all_starts, dtype=int32)
            _, begin = begin_of(pair_tile)
            for z in range(lane_rows):  # padding rows read what the last row reads
                row = int32(16 * group_warp + (lane >> 2) + z // 2 * BLOCK + z % 2 * 8 + first_row * crew)
                m = int32(begin + min(row, pairs - 1))
                channel = m // phases
                element = (g_first + channel % alike * int32(g_stride_c)) & (vector - 1)
                box_at = channel % alike * (pieces * spacing) + channel // alike * pitch
                start = int32(base + x_bytes + box_at + element * itemsize)
                lanes_rows[z] = int32(start + (m % phases * dilation - odd) * itemsize + (lane & 3) * lane_bytes)
                if clears:  # of a channel's pairs, the tile's first
                    mine = row < pairs and (row == 0 or m % phases == 0)
                    starts[z] = start if mine else int32(NOT_MINE)
            barrier = int32(BARRIER + crew if in_turns else BARRIER)
            knows = lanes_rows, starts, int32(base + flags_at), int32(lane & 3), int32(-g_first), barrier
            descriptor = descriptor_of(int64(base))
            s = int32(crew if in_turns else 0)
            loop(acc, v, knows, descriptor, s, int32(0), int32(count - s), full, empty, lane == 0)
            wait_for_all()
            if direct:
                free = int32((base - shared_address(shared, 0)) >> 2)
                store_sums(acc, shared, free, result, crew, group_warp, lane, int64(group), pair_tile, channel_tile,
                           group_rows, group_channels)  # fmt: skip
                return

            slots = split * CONSUMERS + crew if in_turns else split
            target = (slots * tiles + tile) * tile_sums
            both = cuda.local.array(2, dtype=int32)
            for block in range(blocks):
                for b in range(chunk):
                    for z in range(0, sums, 2):
                        m, n = place(group_warp, lane, z)
                        at = target + (b * rows + first_row * crew + BLOCK * block + m) * channels + n
                        both[0] = bits_of(acc[(block * chunk + b) * sums + z])
                        both[1] = bits_of(acc[(block * chunk + b) * sums + z + 1])
                        store_pair(True, result, at, both)

    template, integers = types.UniTuple(types.int64, MAP_WORDS), (types.int64,)
    signature = (template, template, *integers * 3, flat(out_storage), *integers * 13)
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
        # With one group the products are few, however empty.
        return too_few(fewest) if fewest < FEWEST_CHANNELS and problem.groups > 1 else None

    def config(self, problem, dtype, device=None, precision=None):
        """The planes' configuration, or None where grad_output is read in place, and the own one, for contiguous
        tensors."""
        p = problem
        shape, strides = (p.batch, p.out_channels, p.out_length), (p.out_channels * p.out_length, p.out_length, 1)
        found = _config(p, precision or default_precision(dtype), rows_alike(shape, strides, dtype.itemsize))
        return _filling(p, *found, device or gpu.H200)

    def kernels(self, config):
        apart, own = config
        dtype = DTYPES[own.precision]
        others = [] if own.direct else [*map(grad_weight_sum.make_kernel, grad_weight_sum.configs(dtype))]
        others += row_copy.kernels_of(dtype)
        others += [] if apart is None else [planes.make_kernel(apart)]
        return [(make_kernel(own), own.shared_bytes), *((kernel, 0) for kernel in others)]

    def prepare(self, grad_output, x, result, problem, config=None, precision=None):
        p, device = problem, gpu.of(result.index)
        precision = precision or default_precision(result.dtype)
        offset = grad_output.offset % ALIGNMENT
        alike = 0 if offset else rows_alike(grad_output.shape, grad_output.strides, result.dtype.itemsize)
        apart, own = config or _filling(p, *_config(p, precision, alike), device)
        if own.direct and result.offset % ALIGNMENT:
            own = replace(own, direct=False, plane_phases=0)
        for_others = apart is None and own.alike != alike  # the configuration is for other tensors
        aligned = result.offset % ALIGNMENT == 0

        def prepared(g, x):
            blocks, sums, launch = _prepared(p, own, apart is None, *g[:3], x.strides, device)
            maps_room = workspace(blocks, own.alike, result.index)
            partials_room = room((sums * own.blocks_of(p) * own.tile_sums,), torch.float32, result.index)
            to_add = None if own.direct else grad_weight_sum.config_of(p, result.dtype, aligned)
            add_up = to_add and grad_weight_sum.prepare(p, own, sums, to_add)

            def fill(g, x, result):
                maps, partials = maps_room(), None if own.direct else partials_room()
                launch(g.data_ptr(), x.data_ptr(), maps.data_ptr(), result if own.direct else partials)
                if add_up:
                    add_up(partials, result)

            return fill

        def fill_from_copies(grad_output, x, result):
            if for_others:
                grad_output = in_rows(grad_output) if own.alike == 1 else grad_output.clone(memory_format=CONTIGUOUS)
            x, g = in_rows(x), grad_output if apart is None else planes.make_planes(grad_output, p)
            prepared(Layout.of(g), Layout.of(x))(g, x, result)

        if for_others or apart is not None or not lies_in_rows(x):
            return fill_from_copies
        return prepared(grad_output, x)


@lru_cache(maxsize=1024)
def _prepared(
    problem: Problem,
    own: Config,
    in_place: bool,
    g_shape: tuple,
    g_strides: tuple,
    dtype: torch.dtype,
    x_strides: tuple,
    device: gpu.Device,
) -> tuple[int, int, Prepared]:
    """Blocks, partial sums of each element, and the launch. ``in_place``: g is grad_output itself, not its planes."""
    p = problem
    first, rows = (-p.padding, p.out_channels_per_group) if in_place else (0, planes.pairs_of(p))
    splits, tiles = 1 if own.direct else splits_of(p, own, device), own.blocks_of(p)
    sums = splits * (CONSUMERS if own.in_turns else 1)
    g, x = tensor_alike(g_shape, dtype, g_strides), tensor_alike((p.batch, p.in_channels, p.length), dtype, x_strides)
    taps, pair_tiles, channel_tiles = own.tiles(p)
    if own.direct:
        stored = tensor_alike((p.in_channels * p.out_channels_per_group * p.kernel_size,), dtype)
    else:
        stored = tensor_alike((sums * tiles * own.tile_sums,), torch.float32)
    launch = make_kernel(own).prepare(
        splits * tiles,
        *(template_of_rows(g, own), template_of_b(x, own), GIVEN, GIVEN, GIVEN, stored),
        *(g.stride(1), g.shape[2], g.shape[1], first, rows, p.in_channels_per_group),
        *(pair_tiles, channel_tiles, taps, tiles, *own.stages_of(p), splits),
    )
    return splits * tiles, sums, launch


@lru_cache(maxsize=1024)
def _config(problem: Problem, precision: str, alike: int):
    """As ``WeightWarpgroup.config``. ``alike``: that of grad_output's rows (kernels/common/tensor_map.py)."""
    direct = choose(problem, precision, alike) if alike else None
    if direct:
        return None, direct
    return planes.make_config(problem, DTYPES[precision]), choose(problem, precision, 0)


def _filling(problem: Problem, apart, own: Config, device: gpu.Device):
    """The configurations, the second filled for the device."""
    return apart, filling_planes(problem, own, apart.phases, device) if apart else filling(problem, own, device)
