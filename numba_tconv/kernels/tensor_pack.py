"""Weights in the order in which the tensor-core rungs read them, rounded or split once instead of in every tile.

``order`` "wgmma" is that of a K-major operand in shared memory; "mma" that of fragments, where a lane's four registers
of A are 16 consecutive bytes. Both hold (group, row tile, tap chunk, channel chunk, part, tap) in that order around it;
channels, rows and taps that do not exist are zeros. Of weights that come again the packed ones are kept, for as long as
those are unchanged, so that inference packs no more.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from numba import cuda, int32, int64, types, uint32, uint64
from torch.multiprocessing.reductions import StorageWeakRef

from ..elements import ELEMENTS
from ..launch import Kernel, Prepared, alike, flat, strided
from ..layout import Layout, room
from ..problem import Problem
from ..ptx import device_function, round_tf32
from .fragments import mma_a, wgmma_b_at
from .tensor_tile import Tile

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

    @device_function
    def divided(a, b):
        """Quotient and remainder in 32 bits: in 64 they would be most of the kernel's instructions."""
        quotient = int32(uint32(a) // uint32(b))
        return quotient, int32(a - quotient * b)

    def pack_weights(w, packed, row_tiles, tap_chunks, channel_chunks, in_per_group):
        # A block packs one tap and part of a stage: where those are is worked out once for all of its elements.
        number = int32(cuda.blockIdx.x)
        rest, tap = divided(number, int32(chunk))
        rest, part = divided(rest, int32(parts))
        rest, channel_chunk = divided(rest, int32(channel_chunks))
        rest, tap_chunk = divided(rest, int32(tap_chunks))
        group, row_tile = divided(rest, int32(row_tiles))
        first_c, first_t = int32(channel_chunk * depth), (tap_chunk * chunk + tap) * int64(all_rows)
        first_co, first_a = int32(row_tile // row_parts * channels), int32(row_tile % row_parts * phases)
        for step in range(steps):
            e = int32(cuda.threadIdx.x + step * THREADS)
            m, k = place(e)
            c, co, a = int32(first_c + k), int32(first_co + m // phases), int32(first_a + m % phases)
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
class Packing:
    """How weights that lie as ``weights`` are packed; equal choices are one object (``packing_of``), by which the
    packed weights are found."""

    tile: Tile
    order: str
    weights: Layout
    groups: int
    row_tiles: int
    tap_chunks: int
    channel_chunks: int

    @cached_property
    def size(self) -> int:
        """Elements of the packed weights."""
        blocks = self.groups * self.row_tiles * self.tap_chunks * self.channel_chunks
        return blocks * self.tile.stage_weights // self.tile.itemsize

    @cached_property
    def room(self) -> Callable[[], torch.Tensor]:
        return room((self.size,), self.weights.dtype, self.weights.index)

    @cached_property
    def launch(self) -> Prepared:
        """Of the weights, and the room for them."""
        w = self.weights
        return make_kernel(self.tile, self.order).prepare(
            self.size // (self.tile.rows * self.tile.depth),
            *(alike(w.shape, w.dtype, w.strides), alike((self.size,), w.dtype)),
            *(self.row_tiles, self.tap_chunks, self.channel_chunks, w.shape[0] // self.groups),
        )


_packing, _choosing = cache(Packing), threading.Lock()


def packing_of(problem: Problem, tile: Tile, order: str, channel_chunks: int, weights: Layout) -> Packing:
    """How the weights of ``problem`` are packed for ``tile``, which depends on themselves and the groups alone."""
    sizes = tile.row_tiles(problem), tile.tap_chunks(problem), channel_chunks
    with _choosing:  # threads that ask for the first time together get one object, too
        return _packing(tile, order, weights._replace(offset=0), problem.groups, *sizes)


@dataclass
class _Entry:
    version: int
    packed: torch.Tensor
    stream: int
    ready: torch.cuda.Event
    storage: StorageWeakRef  # keeps the storage's identity, not its memory: no other storage gets the same key


MOST_NEW = 4096  # weights that have come once, of which it is remembered: more than models have layers
_entries: dict[tuple, _Entry] = {}
_new: dict[tuple, tuple[int, StorageWeakRef]] = {}  # the version of weights that have come once
_captured: dict[int, StorageWeakRef] = {}  # weights that a CUDA graph reads, and may write
_lock = threading.Lock()


def packed_weights(w: torch.Tensor, packing: Packing) -> torch.Tensor:
    """The packed weights of ``w`` (C_in, C_out/groups, K), ready on the current stream.

    They are kept from the second time on that the same weights come: weights that are computed anew for each call, as
    by weight normalisation, come once. Remembered by storage, place in it and ``w._version``, which every in-place
    operation of torch raises; a write that torch does not count (through ``w.data``, foreign code, or a CUDA graph of
    the optimizer's step alone) is not seen. Inside a graph's capture the weights are packed anew, so that a replay
    packs what they are by then; and from then on at every call, since replays that include the optimizer's step write
    them uncounted.
    """
    if w.is_inference():
        return _pack(w, packing)
    storage, index = w.untyped_storage(), packing.weights.index
    identity, version = storage._cdata, w._version
    if torch.cuda.is_current_stream_capturing():
        _remember(_captured, identity, StorageWeakRef(storage), expired=StorageWeakRef.expired)
    if identity in _captured or _warming_up(index):
        return _pack(w, packing)
    key = identity, w.storage_offset(), packing
    entry = _entries.get(key)
    if entry is None or entry.version != version:
        if entry:  # of weights that are no more
            _entries.pop(key, None)
        if _is_new(key, version, storage):
            return _pack(w, packing)
        packed, ready = _pack(w, packing), torch.cuda.Event()
        ready.record()
        stream = torch._C._cuda_getCurrentRawStream(index)
        entry = _Entry(version, packed, stream, ready, StorageWeakRef(storage))
        _remember(_entries, key, entry, expired=lambda entry: entry.storage.expired())
    elif entry.stream != torch._C._cuda_getCurrentRawStream(index):
        torch.cuda.current_stream().wait_event(entry.ready)
        entry.packed.record_stream(torch.cuda.current_stream())
    return entry.packed


def _is_new(key: tuple, version: int, storage: torch.UntypedStorage) -> bool:
    """Whether these weights come for the first time as they are, so far as it is remembered."""
    seen = _new.get(key)
    if seen is not None and seen[0] == version:
        return False
    with _lock:
        _new.pop(key, None)
        while len(_new) >= MOST_NEW:
            del _new[next(iter(_new))]
        _new[key] = version, StorageWeakRef(storage)
    return True


def _warming_up(device: int) -> bool:
    """Whether torch.compile runs what it is about to capture: in the graph's memory, in which nothing may be kept."""
    trees, kept = sys.modules.get("torch._inductor.cudagraph_trees"), "tree_manager_containers"
    if trees is None or not (hasattr(trees.local, kept) or torch._C._is_key_in_tls(kept)):  # of this thread
        return False
    manager = trees.get_manager(device, create_if_none_exists=False)
    return manager is not None and manager.in_warmup


def _remember(memory: dict, key, value, expired: Callable) -> None:
    """Put ``value`` in the place of what has expired."""
    with _lock:
        for old in [k for k, v in memory.items() if expired(v)]:
            del memory[old]
        memory[key] = value


def _pack(w: torch.Tensor, packing: Packing) -> torch.Tensor:
    packed = packing.room()
    packing.launch(w, packed)
    return packed
