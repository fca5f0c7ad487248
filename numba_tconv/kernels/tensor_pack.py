"""Weights in the order in which the tensor-core rungs read them, rounded or split once instead of in every tile.

``order`` "wgmma" is that of a K-major operand in shared memory; "mma" that of fragments, where a lane's four registers
of A are 16 consecutive bytes. Both hold (group, row tile, tap chunk, channel chunk, part, tap) in that order around it;
channels, rows and taps that do not exist are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from numba import cuda, int32, int64, types, uint64

from ..elements import ELEMENTS
from ..launch import Kernel, Prepared, alike, flat, strided
from ..layout import Layout
from ..problem import Problem
from ..ptx import round_tf32
from .divided import divided
from .fragments import mma_a, wgmma_b_at
from .tensor_tile import Tile
from .weight_cache import Packing, unique

ORDERS = {"k5_mma": "mma", "k6_wgmma": "wgmma"}  # in which rungs take their weights
THREADS = 256

wgmma_place = cuda.jit(device=True, inline="always")(wgmma_b_at)
mma_place = cuda.jit(device=True, inline="always")(mma_a)


@cache
def make_kernel(tile: Tile, order: str) -> Kernel:
    rows, depth, chunk, parts = tile.rows, tile.depth, tile.tap_chunk, tile.parts
    phases, channels, row_parts, all_rows = tile.phases, tile.channels, tile.row_parts, tile.taps.rows
    storage = ELEMENTS[tile.dtype].storage
    rounded = tile.kind == "tf32"
    elements, halves = 16 // tile.itemsize, 4 // tile.itemsize
    block = rows * depth
    steps = -(-block // THREADS)

    if order == "wgmma":

        @cuda.jit(device=True, inline="always")
        def place(e):
            return wgmma_place(e, rows, elements)
    else:

        @cuda.jit(device=True, inline="always")
        def place(e):
            rest, h = divmod(e, halves)
            rest, i = divmod(rest, 4)
            tile16, lane = divmod(rest, 32)
            row, k = mma_place(lane, i, h, halves)
            return tile16 * 16 + row, k

    def pack_weights(w, packed, row_tiles, tap_chunks, channel_chunks, in_per_group):
        # A block packs one tap and part of a stage: where those are is worked out once for all of its elements.
        number = int32(cuda.blockIdx.x)
        rest, tap = divided(number, int32(chunk))
        rest, part = divided(rest, int32(parts))
        rest, channel_chunk = divided(rest, int32(channel_chunks))
        rest, tap_chunk = divided(rest, int32(tap_chunks))
        group, row_tile = divided(rest, int32(row_tiles))
        first_c, first_t = int32(channel_chunk * depth), (tap_chunk * chunk + tap) * int64(all_rows)
        first_co, first_a = int64(row_tile // row_parts) * channels, int64(row_tile % row_parts) * phases
        for step in range(steps):
            e = int32(cuda.threadIdx.x + step * THREADS)
            m, k = place(e)
            c, co, a = int32(first_c + k), first_co + m // phases, first_a + m % phases
            t = first_t + a
            inside = c < in_per_group and m < channels * phases and co < w.shape[1] and a < all_rows and t < w.shape[2]
            inside = inside and e < block
            value = w[group * in_per_group + c, co, t] if inside else storage(0)
            if rounded:
                high = round_tf32(value)
                if part == 1:  # what rounding left over; nothing where that is not a number (infinity - infinity)
                    high = round_tf32(value - high) if high != value else storage(0)
                value = high
            if e < block:
                packed[uint64(int64(number) * block + e)] = value

    signature = (strided(storage, 3), flat(storage)) + (types.int64,) * 4
    return Kernel("pack_weights", pack_weights, signature, THREADS, key=f"{tile!r} {order}")


@dataclass(frozen=True, eq=False)
class TensorPacking(Packing):
    """Weights packed for the tiles of ``tile``."""

    weights: Layout
    tile: Tile
    order: str
    groups: int
    row_tiles: int
    tap_chunks: int
    channel_chunks: int

    @cached_property
    def size(self) -> int:
        blocks = self.groups * self.row_tiles * self.tap_chunks * self.channel_chunks
        return blocks * self.tile.stage_weights // self.tile.itemsize

    @cached_property
    def launch(self) -> Prepared:
        w = self.weights
        return make_kernel(self.tile, self.order).prepare(
            self.size // (self.tile.rows * self.tile.depth),
            *(alike(w.shape, w.dtype, w.strides), alike((self.size,), w.dtype)),
            *(self.row_tiles, self.tap_chunks, self.channel_chunks, w.shape[0] // self.groups),
        )


def packing_of(problem: Problem, tile: Tile, order: str, channel_chunks: int, weights: Layout) -> TensorPacking:
    """How the weights of ``problem`` are packed for ``tile``, which depends on themselves and the groups alone."""
    sizes = tile.row_tiles(problem), tile.tap_chunks(problem), channel_chunks
    return unique(TensorPacking, weights, tile, order, problem.groups, *sizes)
