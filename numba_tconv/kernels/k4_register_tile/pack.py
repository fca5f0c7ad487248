"""Packed weights of k4: (group, row tile, tap chunk, channel chunk, k, tap, m); missing ones are zeros."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from numba import cuda, int32, int64, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.arguments import Weights, arguments, weights_like
from numba_tconv.kernels.common.integer import divided
from numba_tconv.kernels.common.packed_weights import Packing, unique
from numba_tconv.kernels.common.tensor_core.fragments import mma_a
from numba_tconv.kernels.common.weight_box import Box, make_load_box
from numba_tconv.ptx import device_function, griddepcontrol_launch_dependents, load_vector, store_run
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat
from numba_tconv.runtime.layout import Layout

from .tile import Config

THREADS = 128
BATCH = 4  # weights in flight
MOST_BYTES = 8192
ON_GPU = device_function(mma_a)


@dataclass(frozen=True)
class Order:
    """What decides where a weight lies."""

    dtype: torch.dtype
    rows: int  # of taps; step between a row's taps
    block_m: int
    block_k: int
    tap_chunk: int
    phases: int
    channels: int
    row_parts: int
    apart: bool  # by phase
    fragments: bool  # as tensor-core operands: (k / 4, tap, m / 16, lane, row of the lane)

    @property
    def stage(self) -> int:
        return self.block_k * self.tap_chunk * self.block_m


class PackGrid(NamedTuple):
    row_tiles: int
    tap_chunks: int
    channel_chunks: int
    in_per_group: int
    out_channels: int
    kernel_size: int
    way: int  # weight_box.Box.way


class Weight(NamedTuple):
    k: int
    channel: int
    tap: int
    phase: int
    of_tile: bool  # the tile has its row


def order_of(config: Config) -> Order:
    sizes = config.block_m, config.block_k, config.tap_chunk, config.phases, config.channels, config.row_parts
    return Order(config.dtype, config.taps.rows, *sizes, config.apart, config.fragments)


def place_by_rows(order: Order):
    """Build (element ``e`` of a stage) -> input channel, tap, row."""
    block_m, tap_chunk = order.block_m, order.tap_chunk

    def place(e):
        rest, m = e // block_m, e % block_m
        return rest // tap_chunk, rest % tap_chunk, m

    return place


def place_by_fragments(order: Order, fragment):
    """As ``place_by_rows``, in fragments: mma_a's first two registers."""
    tap_chunk, tiles = order.tap_chunk, order.block_m // 16

    def place(e):
        row, k = fragment(e // 2 % 32, e % 2, 0, 1)
        four, rest = e // (64 * tiles * tap_chunk), e // 64 % (tiles * tap_chunk)
        return 4 * four + k, rest // tiles, rest % tiles * 16 + row

    return place


def box_of(order: Order) -> Box:
    """The weights of a block: a stage's channels, or as many as fit in MOST_BYTES."""
    unit = 4 if order.fragments else 1
    weights = order.channels * order.tap_chunk * order.phases * order.dtype.itemsize
    fitting = (k for k in range(order.block_k, 0, -1) if order.block_k % k == 0 and k % unit == 0)
    depth = next((k for k in fitting if k * weights <= MOST_BYTES), unit)
    return Box(order.dtype, depth, order.channels, order.tap_chunk, order.phases, order.rows)


@cache
def make_kernel(order: Order) -> Kernel:
    phases, channels, row_parts = order.phases, order.channels, order.row_parts
    element, apart, box, chunk_taps = ELEMENTS[order.dtype], order.apart, box_of(order), order.tap_chunk * order.rows
    storage, depth, pieces = element.storage, box.depth, order.block_k // box.depth
    packed_piece = order.stage // pieces
    # Neighbours in memory are copied by 16 bytes.
    by_vectors = box.phases_are_vectors and not (order.apart or order.fragments)
    step = box.vector if by_vectors else 1
    batch = BATCH // step
    in_order = place_by_fragments(order, ON_GPU) if order.fragments else place_by_rows(order)
    place, store = device_function(in_order), store_run(element)
    loads = make_load_box(box, THREADS)
    load_box, at_weight, limits_of, within = loads.load, loads.at, loads.limits, loads.within

    @device_function
    def weight_of(e):
        k, tap, m = place(e)
        channel, phase = (m % channels, m // channels) if apart else (m // phases, m % phases)
        return Weight(int32(k), int32(channel), int32(tap), int32(phase), m < channels * phases)

    def k4_pack(weights, packed, grid):
        griddepcontrol_launch_dependents()
        shared = cuda.shared.array(0, dtype=storage)
        number = int32(cuda.blockIdx.x)
        of_taps, piece = divided(number, int32(grid.channel_chunks * pieces))
        of_rows, chunk = divided(of_taps, int32(grid.tap_chunks))
        group, row_tile = divided(of_rows, int32(grid.row_tiles))
        channel, row = int32(piece * depth), int32(row_tile % row_parts * phases)
        input_channel, co = group * grid.in_per_group + channel, int32(row_tile // row_parts * channels)
        first = input_channel, co, row + chunk * int64(chunk_taps)
        left = int32(grid.in_per_group - channel), int32(grid.out_channels - co)
        strides = weights.stride_i, weights.stride_o, weights.stride_k
        pitch = load_box(shared, weights.data, strides, first, left, grid.kernel_size, grid.way)
        limits = limits_of(first, row, left, grid.kernel_size)
        values = cuda.local.array(BATCH, dtype=storage)
        target, e = int64(number) * packed_piece, int32(cuda.threadIdx.x * step)
        while e < packed_piece:
            for z in range(batch):
                w = weight_of(int32(e + z * (THREADS * step)))
                in_box = w.of_tile and w.k < depth
                index = at_weight(pitch, w.k, w.channel, w.tap, w.phase) if in_box else int32(0)
                if by_vectors:
                    load_vector(values, z * step, shared, index)
                else:
                    values[z] = shared[uint64(index)]
                if not (limits.whole and w.of_tile):
                    for u in range(step):
                        exists = w.of_tile and within(limits, w.k, w.channel, w.tap, int32(w.phase + u))
                        values[z * step + u] = values[z * step + u] if exists else storage(0)
            for z in range(batch):
                element = int32(e + z * (THREADS * step))
                if element < packed_piece:
                    if by_vectors:
                        store(packed, target + element, values, z * step)
                    else:
                        packed[uint64(target + element)] = values[z]
            e = int32(e + BATCH * THREADS)

    signature = (arguments(Weights, data=flat(storage)), flat(storage), arguments(PackGrid))
    return Kernel("k4_pack", k4_pack, signature, THREADS, box.shared_bytes, key=repr(order))


@dataclass(frozen=True, eq=False)
class TilePacking(Packing):
    weights: Layout
    order: Order
    groups: int
    row_tiles: int
    tap_chunks: int
    channel_chunks: int

    @cached_property
    def stages(self) -> int:
        return self.groups * self.row_tiles * self.tap_chunks * self.channel_chunks

    @cached_property
    def size(self) -> int:
        return self.stages * self.order.stage

    @property
    def blocks(self) -> int:
        return self.stages * self.order.block_k // box_of(self.order).depth

    @cached_property
    def launch(self) -> Prepared:
        w, order, box = self.weights, self.order, box_of(self.order)
        whole = order.row_parts == 1 and self.tap_chunks == 1
        return make_kernel(order).prepare(
            self.blocks,
            weights_like(w),
            alike((self.size,), w.dtype),
            PackGrid(
                row_tiles=self.row_tiles,
                tap_chunks=self.tap_chunks,
                channel_chunks=self.channel_chunks,
                in_per_group=w.shape[0] // self.groups,
                out_channels=w.shape[1],
                kernel_size=w.shape[2],
                way=box.way(w, whole),
            ),
        )


def packing_of(problem: Problem, config: Config, weights: Layout) -> TilePacking:
    chunks = config.tap_chunks(problem), config.channel_chunks(problem)
    return unique(TilePacking, weights, order_of(config), problem.groups, config.row_tiles(problem), *chunks)
