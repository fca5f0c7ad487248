"""Weights in the order in which a rung reads them, kept for as long as they are unchanged.

Of weights that come again the packed ones are kept, so that inference packs no more.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..launch import Prepared
from ..layout import Layout, room
from ..ptx import SIMULATOR


class Packing:
    """How weights that lie as ``weights`` are packed; equal choices are one object (``unique``), by which the packed
    weights are found."""

    weights: Layout
    size: int  # elements of the packed weights
    launch: Prepared  # of the weights, and the room for the packed ones

    @cached_property
    def room(self) -> Callable[[], torch.Tensor]:
        return room((self.size,), self.weights.dtype, self.weights.index)


_choosing = threading.Lock()


@cache
def _made(kind: type[Packing], *choices) -> Packing:
    return kind(*choices)


def unique(kind: type[Packing], weights: Layout, *choices) -> Packing:
    """The one packing with these choices, wherever the weights begin."""
    with _choosing:  # threads that ask for the first time together get one object, too
        return _made(kind, weights._replace(offset=0), *choices)


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
    # Gradcheck, which is for float64, writes weights where torch does not count it.
    if w.is_inference() or w.dtype == torch.float64 or SIMULATOR:
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
