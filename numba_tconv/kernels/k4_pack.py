"""Weights in the order in which k4's blocks read them: (group, row tile, tap chunk, channel chunk, k, tap, m).

What is no weight (channels, phases and taps beyond the last) is zero, so the main loop has no tail in w.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from numba import cuda, int32, int64, types, uint64

from ..elements import ELEMENTS
from ..launch import Kernel, Prepared, alike, flat, strided
from ..layout import Layout
from ..problem import Problem
from ..ptx import device_function
from .divided import divided
from .fragments import mma_a
from .k4_config import Config
from .packed_weights import Packing, unique

THREADS = 256
BATCH = 4  # weights that a thread has under way
ON_GPU = device_function(mma_a)


@dataclass(frozen=True)
class Order:
    """What of a configuration decides where a weight lies."""

    dtype: torch.dtype
    rows: int  # of an output channel; between taps of one row lie so many
    block_m: int
    block_k: int
    tap_chunk: int
    phases: int
    channels: int
    parts: int  # tiles that share the phases of one output channel
    apart: bool  # rows of a phase lie together
    fragments: bool  # in the order of operands of tensor cores: (k / 4, tap, m / 16, lane, row of the lane)

    @property
    def stage(self) -> int:
        """Packed weights in one stage."""
        return self.block_k * self.tap_chunk * self.block_m


def order_of(config: Config) -> Order:
    sizes = config.block_m, config.block_k, config.tap_chunk, config.phases, config.channels, config.parts
    return Order(config.dtype, config.taps.rows, *sizes, config.apart, config.fragments)


def place_by_rows(order: Order):
    """A function: input channel, tap and row of the element ``e`` of a stage."""
    block_m, tap_chunk = order.block_m, order.tap_chunk

    def place(e):
        rest, m = e // block_m, e % block_m
        return rest // tap_chunk, rest % tap_chunk, m

    return place


def place_by_fragments(order: Order, fragment):
    """The same in the order of fragments; ``fragment``: fragments.mma_a, of which it takes the first two registers."""
    tap_chunk, tiles = order.tap_chunk, order.block_m // 16

    def place(e):
        row, k = fragment(e // 2 % 32, e % 2, 0, 1)
        four, rest = e // (64 * tiles * tap_chunk), e // 64 % (tiles * tap_chunk)
        return 4 * four + k, rest // tiles, rest % tiles * 16 + row

    return place


@cache
def make_kernel(order: Order) -> Kernel:
    tap_chunk, stage = order.tap_chunk, order.stage
    block_k, rows, phases, channels, parts = order.block_k, order.rows, order.phases, order.channels, order.parts
    storage, apart = ELEMENTS[order.dtype].storage, order.apart
    in_order = place_by_fragments(order, ON_GPU) if order.fragments else place_by_rows(order)
    place = device_function(in_order)

    def k4_pack(w, packed, row_tiles, tap_chunks, channel_chunks, in_per_group):
        # A block packs a stage: which one it is, is worked out once for all of its elements.
        number = int32(cuda.blockIdx.x)
        rest, channel_chunk = divided(number, int32(channel_chunks))
        rest, chunk = divided(rest, int32(tap_chunks))
        group, row_tile = divided(rest, int32(row_tiles))
        first_c, first_t = int32(channel_chunk * block_k), chunk * int64(tap_chunk * rows)
        first_co, first_a = int64(row_tile // parts) * channels, int64(row_tile % parts) * phases
        values = cuda.local.array(BATCH, dtype=storage)
        first = int32(cuda.threadIdx.x)
        while first < stage:
            for z in range(BATCH):
                k, tap, m = place(int32(first + z * THREADS))
                c = int32(first_c + k)
                co, a = (
                    first_co + (m % channels if apart else m // phases),
                    first_a + (m // channels if apart else m % phases),
                )
                t = first_t + a + tap * rows
                inside = c < in_per_group and m < channels * phases and co < w.shape[1] and a < rows and t < w.shape[2]
                # The first weight in the place of none, so that the loads, without a branch, are under way together.
                at = (group * in_per_group + c, co, t) if inside else (int64(0), int64(0), int64(0))
                value = w[at]
                values[z] = value if inside else storage(0)
            for z in range(BATCH):
                e = int32(first + z * THREADS)
                if e < stage:
                    packed[uint64(int64(number) * stage + e)] = values[z]
            first = int32(first + BATCH * THREADS)

    signature = (strided(storage, 3), flat(storage)) + (types.int64,) * 4
    return Kernel("k4_pack", k4_pack, signature, THREADS, key=repr(order))


@dataclass(frozen=True, eq=False)
class TilePacking(Packing):
    """Weights packed in ``order``."""

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

    @cached_property
    def launch(self) -> Prepared:
        w = self.weights
        return make_kernel(self.order).prepare(
            self.stages,
            *(alike(w.shape, w.dtype, w.strides), alike((self.size,), w.dtype)),
            *(self.row_tiles, self.tap_chunks, self.channel_chunks, w.shape[0] // self.groups),
        )


def packing_of(problem: Problem, config: Config, weights: Layout) -> TilePacking:
    """How the weights of ``problem`` are packed for ``config``."""
    chunks = config.tap_chunks(problem), config.channel_chunks(problem)
    return unique(TilePacking, weights, order_of(config), problem.groups, config.row_tiles(problem), *chunks)
