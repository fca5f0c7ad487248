"""Weights as split operands (tensor_operand.py), of fp16: first all taps' larger parts, then their smaller ones.

All are scaled by the power of two that the largest weight asks for; the last of the packed elements is its inverse.
"""

from __future__ import annotations

from functools import cache

import torch
from numba import cuda, float32, int32, int64, types, uint32, uint64

from ..elements import ELEMENTS
from ..launch import Kernel, flat
from ..ptx import device_function, f16_to_f32, float_of, pack_f16, store_run
from .tensor_operand import LEAST, exponent_of, inverse_of, scale_of
from .tensor_pack_place import ON_GPU, make_place, make_stage
from .tensor_tile import Tile

THREADS = 128
WORDS = 4  # of 16 bytes, which a thread packs at a time
VECTOR = 2 * WORDS  # elements in them
SCALE = WORDS  # words of them behind the packed weights, of which the last is the inverse of their scale


def largest_of(w: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of the weights, but for infinities and NaN: one float32, on their device."""
    return torch.linalg.vector_norm(torch.nan_to_num(w, nan=0, posinf=0, neginf=0), torch.inf).reshape(1)


@cache
def make_kernel(tile: Tile, order: str) -> Kernel:
    """The kernel, which takes the arguments of tensor_pack.py's and, before the packed weights, ``largest_of`` them."""
    chunk, phases, channels, all_rows = tile.tap_chunk, tile.phases, tile.channels, tile.taps.rows
    block, reciprocal, stage_of = tile.rows * tile.depth, tile.reciprocal, make_stage(tile)
    vectors, block_words = block // VECTOR, block // 2
    steps = -(-vectors // THREADS)
    store = store_run(ELEMENTS[torch.float32])

    # A thread packs 16 bytes at a time. How far their rows and channels are from the first one's is the same for all.
    rows_on, channels_on = zip(*map(make_place(tile, order), range(VECTOR)), strict=True)
    place = device_function(make_place(tile, order, ON_GPU))

    def pack_split(
        w, stride_c, stride_o, stride_k, largest, packed, row_tiles, tap_chunks, channel_chunks, in_per_group,
        out_channels, kernel_size,
    ):  # fmt: skip
        stage, out_channels = stage_of(row_tiles, tap_chunks, channel_chunks, in_per_group), int32(out_channels)
        first_co, first_a, first_t, first_c, channels_left = stage
        values = cuda.local.array(VECTOR, dtype=float32)
        high, low = cuda.local.array(WORDS, dtype=float32), cuda.local.array(WORDS, dtype=float32)
        exponent = max(exponent_of(largest[0]), int32(LEAST))
        scale = scale_of(exponent)
        for step in range(chunk * steps):
            tap, vector = step // steps, int32(cuda.threadIdx.x + step % steps * THREADS)
            first_m, first_k = place(uint32(vector * VECTOR))
            of_vector = (first_c + int32(first_k)) * stride_c
            for u in range(VECTOR):
                m = int32(first_m + rows_on[u])
                channel = int32(int32(m * reciprocal) >> 16)
                co, a = int32(first_co + channel), int32(first_a + m - channel * phases)
                t = first_t + tap * all_rows + a
                there = m < channels * phases and co < out_channels and a < all_rows and t < kernel_size
                there = there and int32(first_k + channels_on[u]) < channels_left and vector < vectors
                at = of_vector + channels_on[u] * stride_c + co * stride_o + t * stride_k
                values[u] = w[uint64(at if there else int64(0))] * scale if there else float32(0)
            if vector < vectors:
                for z in range(WORDS):
                    word = pack_f16(values[2 * z], values[2 * z + 1])
                    for h in range(2):  # what rounding left over; of an infinity, nothing
                        rounded = f16_to_f32(word, h == 1)
                        same = rounded == values[2 * z + h]
                        values[2 * z + h] = float32(0) if same else values[2 * z + h] - rounded
                    high[z], low[z] = float_of(word), float_of(pack_f16(values[2 * z], values[2 * z + 1]))
                at = int64(cuda.blockIdx.x) * (2 * chunk * block_words) + tap * block_words + vector * WORDS
                store(packed, at, high, 0)
                store(packed, at + chunk * block_words, low, 0)
        if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
            packed[uint64(packed.shape[0] - 1)] = inverse_of(exponent)

    integers, stored = (types.int64,), flat(float32)
    signature = (stored, *integers * 3, stored, stored, *integers * 6)
    return Kernel("pack_split", pack_split, signature, THREADS, key=f"{tile!r} {order}")
