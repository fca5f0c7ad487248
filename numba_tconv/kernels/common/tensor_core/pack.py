"""Packed weights of the tensor-core rungs, rounded once instead of in every tile.

Order: (group, row tile, tap chunk, channel chunk, part, tap). Within a tap, "wgmma" is a K-major shared operand, and in
"mma" a lane's four registers of A are 16 consecutive bytes. Missing channels, rows and taps are zeros. A block packs a
stage (kernels/common/weight_box.py); split operands have their own kernel (pack_split.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from numba import cuda, float32, int32, int64, types

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.integer import divided
from numba_tconv.kernels.common.packed_weights import Packing, unique
from numba_tconv.kernels.common.weight_box import make_load_box
from numba_tconv.ptx import griddepcontrol_launch_dependents, round_tf32, store_run
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, alike, flat
from numba_tconv.runtime.layout import Layout

from . import pack_split as tensor_pack_split
from .pack_place import box_of, make_gather, make_stage
from .tile import Tile

ORDERS = {"k5_mma": "mma", "k6_wgmma": "wgmma"}  # the order that each rung reads
THREADS = 128


@cache
def make_kernel(tile: Tile, order: str) -> Kernel:
    element, elements, rounded = ELEMENTS[tile.dtype], 16 // tile.itemsize, tile.kind == "tf32"
    storage, store, box, stage_of = element.storage, store_run(element), box_of(tile), make_stage(tile)
    tap_vectors = tile.rows * tile.depth // elements
    stage_vectors = tile.tap_chunk * tap_vectors
    load_box, at_weight, limits_of, within = make_load_box(box, THREADS)
    gather = make_gather(tile, order, at_weight, within)

    def pack_weights(
        w, stride_c, stride_o, stride_k, packed, row_tiles, tap_chunks, channel_chunks, in_per_group, out_channels,
        kernel_size, way,
    ):  # fmt: skip
        griddepcontrol_launch_dependents()  # lets the next kernel's blocks start as these end
        shared = cuda.shared.array(0, dtype=storage)
        number, first, row, left = stage_of(row_tiles, tap_chunks, channel_chunks, in_per_group, out_channels)
        lies = load_box(shared, w, (stride_c, stride_o, stride_k), first, left, kernel_size, way)
        limits = limits_of(first, row, left, kernel_size)
        values = cuda.local.array(elements, dtype=float32)
        e = int32(cuda.threadIdx.x)
        while e < stage_vectors:
            tap, vector = divided(e, int32(tap_vectors))
            gather(values, shared, lies, limits, tap, vector)
            if rounded:
                for u in range(elements):
                    values[u] = round_tf32(values[u])
            store(packed, (int64(number) * stage_vectors + e) * elements, values, 0)
            e = int32(e + THREADS)

    integers = (types.int64,)
    signature = (flat(storage), *integers * 3, flat(storage), *integers * 7)
    return Kernel("pack_weights", pack_weights, signature, THREADS, box.shared_bytes, key=f"{tile!r} {order}")


@dataclass(frozen=True, eq=False)
class TensorPacking(Packing):
    """Weights packed for ``tile``."""

    weights: Layout
    tile: Tile
    order: str
    groups: int
    row_tiles: int
    tap_chunks: int
    channel_chunks: int

    @property
    def blocks(self) -> int:
        """One block for each stage."""
        return self.groups * self.row_tiles * self.tap_chunks * self.channel_chunks

    @cached_property
    def size(self) -> int:
        return packed_size(self.tile, self.blocks)

    @cached_property
    def launch(self) -> Callable[..., None]:
        w, split, tile = self.weights, self.tile.parts == 2, self.tile
        launch = kernel_of(tile, self.order).prepare(
            self.blocks,
            *(alike(w.shape, w.dtype, w.strides), *w.strides, *([alike((1,), w.dtype)] if split else [])),
            *(alike((self.size,), w.dtype), self.row_tiles, self.tap_chunks, self.channel_chunks),
            *(w.shape[0] // self.groups, *w.shape[1:], box_of(tile).way(w, tile.whole and not tile.several_chunks)),
        )
        return (lambda w, packed: launch(w, tensor_pack_split.largest_of(w), packed)) if split else launch


def kernel_of(tile: Tile, order: str) -> Kernel:
    """The kernel that packs weights for ``tile``."""
    return tensor_pack_split.make_kernel(tile, order) if tile.parts == 2 else make_kernel(tile, order)


def packed_size(tile: Tile, blocks: int) -> int:
    """Elements of the packed weights of ``blocks`` stages."""
    return blocks * tile.depth_weights // tile.itemsize + (tensor_pack_split.SCALE if tile.parts == 2 else 0)


def packing_of(problem: Problem, tile: Tile, order: str, channel_chunks: int, weights: Layout) -> TensorPacking:
    """The packing of weights (C_in, C_out/groups, K), laid out as ``weights``, for ``tile``; batch and length do not
    matter. ``channel_chunks``: product depths of a tap chunk.
    """
    sizes = tile.row_tiles(problem), tile.tap_chunks(problem), channel_chunks
    return unique(TensorPacking, weights, tile, order, problem.groups, *sizes)
