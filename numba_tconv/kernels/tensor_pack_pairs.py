"""Weights of 16 bits packed two neighbouring taps at a time: phases of one output channel, rows of the tile side by
side. With half of the loads, and more of them under way, dac_u1's weights take 0.022 ms in bfloat16 instead of 0.041
(H200, profiles of a training step; no recorded rows).
"""

from __future__ import annotations

from functools import cache

from numba import cuda, float32, int32, int64, types, uint32

from ..elements import ELEMENTS
from ..launch import Kernel, flat
from ..ptx import device_function, load_pair, store_run
from .tensor_pack_place import ON_GPU, make_place, make_stage
from .tensor_tile import Tile

THREADS = 128
TOGETHER = 2  # rounds of which all is loaded before anything is stored


def suits(tile: Tile, order: str, kernel_size: int, strides: tuple[int, ...]) -> bool:
    """Whether every pair of rows is two neighbouring taps that stand at a multiple of two elements from the first
    weight; that one must itself stand at a multiple of 4 bytes."""
    even = tile.phases, tile.taps.rows, kernel_size, *strides[:2]
    return order == "wgmma" and tile.itemsize == 2 and strides[2] == 1 and all(size % 2 == 0 for size in even)


@cache
def make_kernel(tile: Tile) -> Kernel:
    """The kernel, which takes the arguments of tensor_pack.py's."""
    rows, depth, chunk, phases, channels = tile.rows, tile.depth, tile.tap_chunk, tile.phases, tile.channels
    all_rows, reciprocal, elements = tile.taps.rows, tile.reciprocal, 16 // tile.itemsize
    element = ELEMENTS[tile.dtype]
    load, store, stage_of = load_pair(element), store_run(element), make_stage(tile)
    place = device_function(make_place(tile, "wgmma", ON_GPU))
    pairs = rows * depth // elements // 2  # of vectors, in a tap: the same channels of a row and of the next
    steps = -(-pairs // THREADS)
    rounds, all_values = chunk * steps, TOGETHER * elements

    @device_function
    def pair_of(number):
        """The thread's tap of a round, its pair, and whether that exists."""
        pair = int32(cuda.threadIdx.x + number % steps * THREADS)
        return number // steps, pair, pair < pairs and number < rounds

    def pack_pairs(
        w, stride_c, stride_o, stride_k, packed, row_tiles, tap_chunks, channel_chunks, in_per_group, out_channels,
        kernel_size,
    ):  # fmt: skip
        first_co, first_a, first_t, first_c, left = stage_of(row_tiles, tap_chunks, channel_chunks, in_per_group)
        lower, upper = cuda.local.array(all_values, dtype=float32), cuda.local.array(all_values, dtype=float32)
        for first in range(0, rounds, TOGETHER):
            for z in range(TOGETHER):
                tap, pair, exists = pair_of(first + z)
                m, k = place(uint32(pair * (2 * elements)))
                channel = int32(int32(int32(m) * reciprocal) >> 16)
                co, a = int32(first_co + channel), int32(first_a + int32(m) - channel * phases)
                t = first_t + tap * all_rows + a
                exists = exists and m < channels * phases and co < out_channels and a < all_rows and t < kernel_size
                at = (first_c + int32(k)) * stride_c + co * stride_o + t
                for u in range(elements):
                    load(lower, upper, z * elements + u, w, at + u * stride_c, exists and int32(k) + u < left)
            for z in range(TOGETHER):
                tap, pair, exists = pair_of(first + z)
                if exists:
                    at = int64(cuda.blockIdx.x) * (chunk * rows * depth) + tap * (rows * depth) + pair * (2 * elements)
                    store(packed, at, lower, z * elements)
                    store(packed, at + elements, upper, z * elements)

    integers = (types.int64,)
    signature = (flat(element.storage), *integers * 3, flat(element.storage), *integers * 6)
    return Kernel("pack_pairs", pack_pairs, signature, THREADS, key=repr(tile))
