"""Copies with 16-byte aligned rows, for the copy engine."""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from numba import cuda, int32, int64, uint32

from numba_tconv.ptx import load_guarded, load_run, store_run
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat
from numba_tconv.runtime.layout import Layout, room

from .arguments import arguments
from .tensor_map import ALIGNMENT, lies_in_rows, row_pitch

THREADS = 256
LAYER = 1 << 31  # most vectors in a grid layer, counted in 32 bits


class Source(NamedTuple):
    """A tensor (outer, inner, L), copied from element ``first`` of each row on."""

    data: object
    offset: int  # elements past a 16-byte boundary
    stride_outer: int
    stride_inner: int
    stride_l: int
    inner: int
    length: int
    first: int


class Result(NamedTuple):
    data: object
    vectors: int  # of a row
    layer_rows: int
    rows: int


@cache
def make_kernel(dtype: torch.dtype) -> Kernel:
    element, vector = ELEMENTS[dtype], ALIGNMENT // dtype.itemsize
    load, load_one_by_one, store = load_run(element, vector), load_guarded(element, vector), store_run(element)
    wide = element.accumulator

    def row_copy(x, result):
        e = cuda.grid(1)
        row_of_layer = int64(uint32(e) // uint32(result.vectors))
        row = cuda.blockIdx.y * result.layer_rows + row_of_layer
        if row_of_layer >= result.layer_rows or row >= result.rows:
            return
        column = (e - row_of_layer * result.vectors) * vector
        outer = int64(uint32(row) // uint32(x.inner))
        source = outer * x.stride_outer + (row - outer * x.inner) * x.stride_inner
        begin = column + x.first
        values = cuda.local.array(vector, dtype=wide)
        skip = (x.offset + source + begin) & (vector - 1)
        if x.stride_l == 1 and begin >= skip and begin - skip + 2 * vector <= x.length:
            load(values, x.data, source + begin - skip, int32(skip))
        else:
            clamped = int32(max(int64(-vector), min(begin, x.length)))
            load_one_by_one(values, x.data, source, x.stride_l, clamped, int32(x.length))
        store(result.data, row * (result.vectors * vector) + column, values, 0)

    stored = flat(element.storage)
    signature = arguments(Source, data=stored), arguments(Result, data=stored)
    return Kernel("row_copy", row_copy, signature, THREADS, key=str(dtype))


@lru_cache(maxsize=1024)
def _prepared(
    shape: tuple[int, int, int], strides: tuple, dtype: torch.dtype, offset: int, pitch: int, first: int
) -> Prepared:
    (outer, inner, length), vectors = shape, pitch * dtype.itemsize // ALIGNMENT
    rows = outer * inner
    if rows >= 1 << 32:
        raise NotImplementedError(f"a copy of {rows:,} rows: they are counted in 32 bits")
    layers = -(-rows * vectors // LAYER)
    layer_rows = -(-rows // layers)
    return make_kernel(dtype).prepare(
        (-(-layer_rows * vectors // THREADS), layers, 1),
        Source(alike(shape, dtype, strides), offset, *strides, inner, length, first),
        Result(alike((rows * pitch,), dtype), vectors, layer_rows, rows),
    )


def copying(x: Layout, pitch: int, first: int = 0, result: tuple | None = None) -> Callable:
    """A copy, on torch's current stream, of tensors like ``x``, (outer, inner, L), to (outer, inner, ``pitch``).

    Element e of a row is the tensor's element ``e + first``, or zero. ``pitch``: elements, a multiple of 16 bytes;
    ``result``: another shape of equal size."""
    make_room = room(result or (*x.shape[:2], pitch), x.dtype, x.index)
    elements = x.offset % ALIGNMENT // x.dtype.itemsize
    launch = _prepared(tuple(x.shape), tuple(x.strides), x.dtype, elements, pitch, first)

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        made = make_room()
        launch(tensor, made)
        return made

    return copy


def copied(tensor: torch.Tensor, pitch: int, first: int = 0) -> torch.Tensor:
    """Copy ``tensor`` as ``copying``."""
    return copying(Layout.of(tensor), pitch, first)(tensor)


def to_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Copy (N, C, L) to 16-byte aligned rows."""
    length = tensor.shape[2]
    return copied(tensor, row_pitch(length, tensor.element_size()))[:, :, :length]


def in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` (N, C, L) if one tensor map describes it, else ``to_rows(tensor)``."""
    return tensor if lies_in_rows(Layout.of(tensor)) else to_rows(tensor)
