"""Packed weights as split operands of fp16 (split_operand.py): the larger parts of all taps, then the smaller ones.

One power of two scales all weights. The last packed element is its inverse.
"""

from __future__ import annotations

from functools import cache

import torch
from numba import cuda, float32, int32, int64, types, uint64

from numba_tconv.kernels.common.integer import divided
from numba_tconv.kernels.common.weight_box import make_load_box
from numba_tconv.ptx import f16_to_f32, float_of, griddepcontrol_launch_dependents, pack_f16, store_run
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, flat

from .pack_place import box_of, make_gather, make_stage
from .split_operand import LEAST, exponent_of, inverse_of, scale_of
from .tile import Tile

THREADS = 128
WORDS = 4  # words of 16 bytes, which a thread packs at a time
VECTOR = 2 * WORDS  # elements in WORDS
SCALE = WORDS  # words behind the packed weights; the last is the inverse of the scale


def largest_of(w: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude of the weights: one float32 on their device."""
    return torch.linalg.vector_norm(torch.nan_to_num(w, nan=0, posinf=0, neginf=0), torch.inf).reshape(1)


@cache
def make_kernel(tile: Tile, order: str) -> Kernel:
    """The kernel. It takes the arguments of pack.py's and, before the packed weights, ``largest_of`` the weights."""
    store, box, stage_of = store_run(ELEMENTS[torch.float32]), box_of(tile), make_stage(tile)
    tap_vectors = tile.rows * tile.depth // VECTOR
    stage_vectors = tile.tap_chunk * tap_vectors
    load_box, at_weight, limits_of, within = make_load_box(box, THREADS)
    gather = make_gather(tile, order, at_weight, within)

    def pack_split(
        w, stride_c, stride_o, stride_k, largest, packed, row_tiles, tap_chunks, channel_chunks, in_per_group,
        out_channels, kernel_size, way,
    ):  # fmt: skip
        griddepcontrol_launch_dependents()  # lets the next kernel's blocks start as these end
        shared = cuda.shared.array(0, dtype=float32)
        number, first, row, left = stage_of(row_tiles, tap_chunks, channel_chunks, in_per_group, out_channels)
        lies = load_box(shared, w, (stride_c, stride_o, stride_k), first, left, kernel_size, way)
        limits = limits_of(first, row, left, kernel_size)
        values = cuda.local.array(VECTOR, dtype=float32)
        high, low = cuda.local.array(WORDS, dtype=float32), cuda.local.array(WORDS, dtype=float32)
        exponent = max(exponent_of(largest[0]), int32(LEAST))
        scale = scale_of(exponent)
        e = int32(cuda.threadIdx.x)
        while e < stage_vectors:
            tap, vector = divided(e, int32(tap_vectors))
            gather(values, shared, lies, limits, tap, vector)
            for u in range(VECTOR):
                values[u] *= scale
            for z in range(WORDS):
                word = pack_f16(values[2 * z], values[2 * z + 1])
                for h in range(2):  # the remainder of rounding; zero for an infinity
                    rounded = f16_to_f32(word, h == 1)
                    same = rounded == values[2 * z + h]
                    values[2 * z + h] = float32(0) if same else values[2 * z + h] - rounded
                high[z], low[z] = float_of(word), float_of(pack_f16(values[2 * z], values[2 * z + 1]))
            at = (int64(number) * (2 * stage_vectors) + e) * WORDS
            store(packed, at, high, 0)
            store(packed, at + stage_vectors * WORDS, low, 0)
            e = int32(e + THREADS)
        if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
            packed[uint64(packed.shape[0] - 1)] = inverse_of(exponent)

    integers, stored = (types.int64,), flat(float32)
    signature = (stored, *integers * 3, stored, stored, *integers * 7)
    return Kernel("pack_split", pack_split, signature, THREADS, box.shared_bytes, key=f"{tile!r} {order}")
