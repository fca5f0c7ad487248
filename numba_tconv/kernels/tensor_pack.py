"""Weights in the order in which the tensor-core rungs read them, rounded once instead of in every tile.

``order`` "wgmma" is that of a K-major operand in shared memory; "mma" that of fragments, where a lane's four registers
of A are 16 consecutive bytes. Both hold (group, row tile, tap chunk, channel chunk, part, tap) in that order around it;
channels, rows and taps that do not exist are zeros.

A training step packs the weights anew, so it counts: a thread loads 16 bytes' worth of elements, for the "wgmma" order
of as many channels, whose neighbours in memory its neighbours load. Element by element, with channels side by side in a
warp, dac_u1's weights took 0.112 ms in bfloat16 and 0.124 in TF32 instead of 0.052 and 0.042 (H200, profiles; no
recorded rows). Of 16 bits most are packed by twos (tensor_pack_pairs.py), and split operands have a kernel of their own
(tensor_pack_split.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from numba import cuda, float32, int32, int64, types, uint32, uint64

from ..elements import ELEMENTS
from ..launch import Kernel, Prepared, alike, flat
from ..layout import Layout
from ..problem import Problem
from ..ptx import device_function, round_tf32, store_run
from . import tensor_pack_pairs, tensor_pack_split
from .packed_weights import Packing, unique
from .tensor_pack_place import ON_GPU, make_place, make_stage
from .tensor_tile import Tile

ORDERS = {"k5_mma": "mma", "k6_wgmma": "wgmma"}  # in which rungs take their weights
THREADS = 128


@cache
def make_kernel(tile: Tile, order: str) -> Kernel:
    rows, depth, chunk = tile.rows, tile.depth, tile.tap_chunk
    phases, channels, all_rows, stage_of = tile.phases, tile.channels, tile.taps.rows, make_stage(tile)
    element, elements, reciprocal = ELEMENTS[tile.dtype], 16 // tile.itemsize, tile.reciprocal
    load, store = element.load, store_run(element)
    rounded, block = tile.kind == "tf32", rows * depth
    vectors = block // elements
    steps = -(-vectors // THREADS)

    # A thread packs 16 bytes at a time. How far their rows and channels are from the first one's is the same for all.
    rows_on, channels_on = zip(*map(make_place(tile, order), range(elements)), strict=True)
    place = device_function(make_place(tile, order, ON_GPU))

    def pack_weights(
        w, stride_c, stride_o, stride_k, packed, row_tiles, tap_chunks, channel_chunks, in_per_group, out_channels,
        kernel_size,
    ):  # fmt: skip
        stage, out_channels = stage_of(row_tiles, tap_chunks, channel_chunks, in_per_group), int32(out_channels)
        first_co, first_a, first_t, first_c, channels_left = stage
        values = cuda.local.array(elements, dtype=float32)
        for step in range(chunk * steps):
            tap, vector = step // steps, int32(cuda.threadIdx.x + step % steps * THREADS)
            first_m, first_k = place(uint32(vector * elements))
            of_vector = (first_c + int32(first_k)) * stride_c
            for u in range(elements):
                m = int32(first_m + rows_on[u])
                channel = int32(int32(m * reciprocal) >> 16)
                co, a = int32(first_co + channel), int32(first_a + m - channel * phases)
                t = first_t + tap * all_rows + a
                there = m < channels * phases and co < out_channels and a < all_rows and t < kernel_size
                there = there and int32(first_k + channels_on[u]) < channels_left and vector < vectors
                at = of_vector + channels_on[u] * stride_c + co * stride_o + t * stride_k
                values[u] = load(w[uint64(at if there else int64(0))]) if there else float32(0)
            if vector < vectors:
                if rounded:
                    for u in range(elements):
                        values[u] = round_tf32(values[u])
                at = int64(cuda.blockIdx.x) * (chunk * block) + tap * block + vector * elements
                store(packed, at, values, 0)

    integers = (types.int64,)
    signature = (flat(element.storage), *integers * 3, flat(element.storage), *integers * 6)
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
        return packed_size(self.tile, blocks)

    def _prepare(self, kernel: Kernel, *others: torch.Tensor) -> Prepared:
        w = self.weights
        return kernel.prepare(
            self.row_tiles * self.groups * self.tap_chunks * self.channel_chunks,
            *(alike(w.shape, w.dtype, w.strides), *w.strides, *others, alike((self.size,), w.dtype)),
            *(self.row_tiles, self.tap_chunks, self.channel_chunks, w.shape[0] // self.groups, *w.shape[1:]),
        )

    @cached_property
    def launch(self) -> Callable[..., None]:
        kernel, largest_of = kernel_of(self.tile, self.order), tensor_pack_split.largest_of
        if self.tile.parts == 2:
            split = self._prepare(kernel, alike((1,), self.weights.dtype))
            return lambda w, packed: split(w, largest_of(w), packed)
        one_by_one = self._prepare(kernel)
        if not tensor_pack_pairs.suits(self.tile, self.order, self.weights.shape[2], self.weights.strides):
            return one_by_one
        by_pairs = self._prepare(tensor_pack_pairs.make_kernel(self.tile))
        return lambda w, packed: (one_by_one if w.data_ptr() % 4 else by_pairs)(w, packed)


def kernel_of(tile: Tile, order: str) -> Kernel:
    """The one that packs weights wherever they lie."""
    return tensor_pack_split.make_kernel(tile, order) if tile.parts == 2 else make_kernel(tile, order)


def packed_size(tile: Tile, blocks: int) -> int:
    """Elements of the packed weights of so many stages."""
    return blocks * tile.depth_weights // tile.itemsize + (tensor_pack_split.SCALE if tile.parts == 2 else 0)


def kernels_of(problem: Problem, tile: Tile, order: str) -> list[Kernel]:
    """Those that pack the weights of ``problem`` for ``tile``, if they are contiguous, at a multiple of 4 bytes."""
    strides = problem.out_channels_per_group * problem.kernel_size, problem.kernel_size, 1
    pairs = tensor_pack_pairs.suits(tile, order, problem.kernel_size, strides)
    return [tensor_pack_pairs.make_kernel(tile) if pairs else kernel_of(tile, order)]


def packing_of(problem: Problem, tile: Tile, order: str, channel_chunks: int, weights: Layout) -> TensorPacking:
    """How the weights of ``problem`` are packed for ``tile``, which depends on themselves and the groups alone."""
    sizes = tile.row_tiles(problem), tile.tap_chunks(problem), channel_chunks
    return unique(TensorPacking, weights, tile, order, problem.groups, *sizes)
