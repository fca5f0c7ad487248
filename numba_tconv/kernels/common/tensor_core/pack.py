"""Packed weights of tensor-core rungs, rounded once. A block packs a stage.

Order: (group, row tile, tap chunk, channel chunk, operand half, tap). A tap is a K-major shared operand of wgmma, or
mma.sync's A, 16 bytes a lane. Missing channels, rows and taps are zeros.

Split operands are fp16, scaled by a power of two, whose inverse is the last element."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from numba import cuda, float32, int32, int64, types, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.arguments import Weights, arguments, weights_like
from numba_tconv.kernels.common.integer import divided
from numba_tconv.kernels.common.packed_weights import Packing, unique
from numba_tconv.kernels.common.weight_box import Box, make_load_box
from numba_tconv.kernels.rung import Step
from numba_tconv.ptx import (
    device_function,
    f16_to_f32,
    float_of,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    pack_f16,
    round_tf32,
    store_run,
)
from numba_tconv.runtime import device
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, alike, flat
from numba_tconv.runtime.layout import Layout

from .fragments import mma_a, split_channel, wgmma_b_at
from .largest import finder, make_largest_of_block
from .largest import make_kernel as largest_kernel
from .split_operand import LEAST, exponent_of, inverse_of, scale_of
from .tile import Tile

THREADS = 128
WORDS = 4
SCALE = WORDS  # words behind packed split operands
MAPS = wgmma_b_at, mma_a, split_channel
ON_GPU = tuple(map(device_function, MAPS))


class Sizes(NamedTuple):
    row_tiles: int
    tap_chunks: int
    channel_chunks: int
    in_per_group: int
    out_channels: int
    kernel_size: int


class Stage(NamedTuple):
    number: int
    first: tuple  # input channel, output channel, tap
    first_row: int
    left: tuple  # input and output channels


@cache
def make_kernel(tile: Tile, order: str) -> Kernel:
    element, elements, rounded = ELEMENTS[tile.dtype], 16 // tile.itemsize, tile.kind == "tf32"
    storage, store, box = element.storage, store_run(element), box_of(tile)
    tap_vectors = tile.rows * tile.depth // elements
    stage_vectors = tile.tap_chunk * tap_vectors
    loads = make_load_box(box, THREADS)
    load_box, at_weight, limits_of, within = loads.load, loads.at, loads.limits, loads.within
    stage_of, gather = make_stage_of(tile), make_gather(tile, order, at_weight, within)

    def pack_weights(weights, packed, sizes, way):
        griddepcontrol_launch_dependents()
        shared = cuda.shared.array(0, dtype=storage)
        stage, strides = stage_of(sizes), (weights.stride_i, weights.stride_o, weights.stride_k)
        lies = load_box(shared, weights.data, strides, stage.first, stage.left, sizes.kernel_size, way)
        limits = limits_of(stage.first, stage.first_row, stage.left, sizes.kernel_size)
        values = cuda.local.array(elements, dtype=float32)
        e = int32(cuda.threadIdx.x)
        while e < stage_vectors:
            tap, vector = divided(e, int32(tap_vectors))
            gather(values, shared, lies, limits, tap, vector)
            if rounded:
                for u in range(elements):
                    values[u] = round_tf32(values[u])
            store(packed, (int64(stage.number) * stage_vectors + e) * elements, values, 0)
            e = int32(e + THREADS)

    data = flat(storage)
    signature = arguments(Weights, data=data), data, arguments(Sizes), types.int64
    return Kernel("pack_weights", pack_weights, signature, THREADS, box.shared_bytes, key=f"{tile!r} {order}")


@cache
def make_split_kernel(tile: Tile, order: str) -> Kernel:
    """The kernel for split operands, which also takes ``finder``'s magnitudes."""
    store, box, elements = store_run(ELEMENTS[torch.float32]), box_of(tile), 2 * WORDS
    tap_vectors = tile.rows * tile.depth // elements
    stage_vectors = tile.tap_chunk * tap_vectors
    loads = make_load_box(box, THREADS)
    load_box, at_weight, limits_of, within = loads.load, loads.at, loads.limits, loads.within
    stage_of, gather = make_stage_of(tile), make_gather(tile, order, at_weight, within)
    threads, largest_of_block = THREADS, make_largest_of_block(THREADS)

    def pack_split(weights, largest, packed, sizes, way):
        griddepcontrol_launch_dependents()
        shared, compared = cuda.shared.array(0, dtype=float32), cuda.shared.array(threads, dtype=float32)
        stage, strides = stage_of(sizes), (weights.stride_i, weights.stride_o, weights.stride_k)
        lies = load_box(shared, weights.data, strides, stage.first, stage.left, sizes.kernel_size, way)
        limits = limits_of(stage.first, stage.first_row, stage.left, sizes.kernel_size)
        values = cuda.local.array(elements, dtype=float32)
        high, low = cuda.local.array(WORDS, dtype=float32), cuda.local.array(WORDS, dtype=float32)
        griddepcontrol_wait()
        thread = int32(cuda.threadIdx.x)
        own = largest[uint64(thread)] if thread < largest.shape[0] else float32(0)
        exponent = max(exponent_of(largest_of_block(compared, own)), int32(LEAST))
        scale = scale_of(exponent)
        e = int32(cuda.threadIdx.x)
        while e < stage_vectors:
            tap, vector = divided(e, int32(tap_vectors))
            gather(values, shared, lies, limits, tap, vector)
            for u in range(elements):
                values[u] *= scale
            for z in range(WORDS):
                word = pack_f16(values[2 * z], values[2 * z + 1])
                for h in range(2):  # infinities leave no remainder
                    rounded = f16_to_f32(word, h == 1)
                    same = rounded == values[2 * z + h]
                    values[2 * z + h] = float32(0) if same else values[2 * z + h] - rounded
                high[z], low[z] = float_of(word), float_of(pack_f16(values[2 * z], values[2 * z + 1]))
            first_word = (int64(stage.number) * (2 * stage_vectors) + e) * WORDS
            store(packed, first_word, high, 0)
            store(packed, first_word + stage_vectors * WORDS, low, 0)
            e = int32(e + THREADS)
        if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
            packed[uint64(packed.shape[0] - 1)] = inverse_of(exponent)

    data = flat(float32)
    signature = arguments(Weights, data=data), data, data, arguments(Sizes), types.int64
    return Kernel("pack_split", pack_split, signature, THREADS, box.shared_bytes, key=f"{tile!r} {order}")


def make_place(tile: Tile, order: str, maps: tuple = MAPS) -> Callable:
    """Build (e): row and channel of element ``e`` of a tap. ``maps``: MAPS, or ON_GPU in kernels."""
    rows, elements, halves = tile.rows, 16 // tile.operand_size, 4 // tile.operand_size
    of_wgmma, of_mma, of_split = maps

    def wgmma_place(e):
        return of_wgmma(e, rows, elements)

    def mma_place(e):
        word, h = divmod(e, halves)
        of_lane, i = divmod(word, 4)
        tile16, lane = divmod(of_lane, 32)
        row, k = of_mma(lane, i, h, halves)
        return tile16 * 16 + row, k

    place = {"wgmma": wgmma_place, "mma": mma_place}[order]
    if tile.operand_halves == 1:
        return place
    inner = place if maps is MAPS else device_function(place)

    def split_place(e):
        row, k = inner(e)
        return row, of_split(k)

    return split_place


def box_of(tile: Tile) -> Box:
    return Box(tile.dtype, tile.depth, tile.channels, tile.tap_chunk, tile.phases, tile.taps.rows)


def make_stage_of(tile: Tile) -> Callable:
    """Build ``stage_of(sizes)``: the Stage that a block packs."""
    depth, channels, phases, row_parts = tile.depth, tile.channels, tile.phases, tile.row_parts
    chunk_taps = tile.tap_chunk * tile.taps.rows

    @device_function
    def stage_of(sizes):
        number = int32(cuda.blockIdx.x)
        of_channels, channel_chunk = divided(number, int32(sizes.channel_chunks))
        of_taps, tap_chunk = divided(of_channels, int32(sizes.tap_chunks))
        group, row_tile = divided(of_taps, int32(sizes.row_tiles))
        co, row = int32(row_tile // row_parts * channels), int32(row_tile % row_parts * phases)
        first = group * sizes.in_per_group + channel_chunk * depth, co, row + tap_chunk * int64(chunk_taps)
        left = int32(sizes.in_per_group - channel_chunk * depth), int32(sizes.out_channels - co)
        return Stage(number, first, row, left)

    return stage_of


def make_gather(tile: Tile, order: str, at_weight: Callable, within: Callable) -> Callable:
    """Build ``gather``: ``values`` get 16 bytes (``vector``) of ``tap``, as float32; missing weights are zeros."""
    elements, phases, channels, reciprocal = 16 // tile.operand_size, tile.phases, tile.channels, tile.reciprocal
    widened, all_weights = ELEMENTS[tile.dtype].load, tile.channels * tile.phases == tile.rows
    # Elements have the same distances in each vector.
    rows_on, channels_on = zip(*map(make_place(tile, order), range(elements)), strict=True)
    place = device_function(make_place(tile, order, ON_GPU))

    @device_function
    def gather(values, shared, lies, limits, tap, vector):
        first_m, first_k = place(uint32(vector * elements))
        if all_weights and limits.whole:
            for u in range(elements):
                m, k = int32(first_m + rows_on[u]), int32(first_k + channels_on[u])
                channel = int32(int32(m * reciprocal) >> 16)
                index = at_weight(lies, k, channel, tap, int32(m - channel * phases))
                values[u] = widened(shared[uint64(index)])
        else:
            for u in range(elements):
                m, k = int32(first_m + rows_on[u]), int32(first_k + channels_on[u])
                channel = int32(int32(m * reciprocal) >> 16)
                a = int32(m - channel * phases)
                exists = m < channels * phases and within(limits, k, channel, tap, a)
                value = widened(shared[uint64(at_weight(lies, k, channel, tap, a) if exists else int32(0))])
                values[u] = value if exists else float32(0)

    return gather


@dataclass(frozen=True, eq=False)
class TensorPacking(Packing):
    weights: Layout
    tile: Tile
    order: str  # "wgmma" or "mma"
    groups: int
    row_tiles: int
    tap_chunks: int
    channel_chunks: int

    @property
    def blocks(self) -> int:
        return self.groups * self.row_tiles * self.tap_chunks * self.channel_chunks

    @cached_property
    def size(self) -> int:
        return packed_size(self.tile, self.blocks)

    @cached_property
    def launch(self) -> Callable[..., None]:
        w, tile = self.weights, self.tile
        weights, packed = weights_like(w), alike((self.size,), w.dtype)
        sizes = Sizes(self.row_tiles, self.tap_chunks, self.channel_chunks, w.shape[0] // self.groups, *w.shape[1:])
        way = box_of(tile).way(w, tile.whole and not tile.several_chunks)
        kernel = kernel_of(tile, self.order)
        if tile.operand_halves == 1:
            return kernel.prepare(self.blocks, weights, packed, sizes, way)
        find, count = finder(w, THREADS)
        early = device.of(w.index).launches_early
        launch = kernel.prepare(self.blocks, weights, alike((count,), w.dtype), packed, sizes, way, early=early)
        return lambda w, packed: launch(w, find(w), packed)


def kernel_of(tile: Tile, order: str) -> Kernel:
    return make_split_kernel(tile, order) if tile.operand_halves == 2 else make_kernel(tile, order)


def steps(tile: Tile, order: str) -> list[Step]:
    pack = kernel_of(tile, order)
    largest = [Step("scale", largest_kernel())] if tile.operand_halves == 2 else []
    return [*largest, Step("pack", pack, pack.shared_bytes)]


def packed_size(tile: Tile, blocks: int) -> int:
    return blocks * tile.depth_weights // tile.itemsize + (SCALE if tile.operand_halves == 2 else 0)


def packing_of(problem: Problem, tile: Tile, order: str, channel_chunks: int, weights: Layout) -> TensorPacking:
    """The packing for ``tile``, at any batch and length."""
    sizes = tile.row_tiles(problem), tile.tap_chunks(problem), channel_chunks
    return unique(TensorPacking, weights, tile, order, problem.groups, *sizes)
