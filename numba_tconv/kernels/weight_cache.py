"""Weights in the order in which a rung reads them, kept for as long as they are unchanged.

Of weights that come again the packed ones are kept, so that inference packs no more, unless they are float64.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
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
class _Packed:
    weights: torch.Tensor
    stream: int
    ready: torch.cuda.Event


@dataclass
class _Kept:
    """What is kept of the weights at one place of a storage."""

    version: int
    storage: StorageWeakRef  # keeps the storage's identity, not its memory: no other storage gets the same key
    packed: dict[Packing, _Packed]


MOST_PACKINGS = 4  # of the same weights: other lengths may have other tiles
# After so many weights of a packing in a row that come once, and while none has come again, only one of so many is
# looked for and remembered: that takes the host two microseconds.
PATIENCE, SELDOM = 16, 4
MOST_NEW = 4096  # places of weights that have come once, of which it is remembered: more than models have layers
_kept: dict[tuple[int, int], _Kept] = {}
# By address and packing, the version of weights that have come once. Of those that are computed for each call, the next
# mostly come where the allocator had the last: they take the place of those, which are gone.
_new: OrderedDict[tuple[int, Packing], tuple[int, StorageWeakRef]] = OrderedDict()
_once: dict[Packing, int] = {}  # of a packing, the latest weights in a row that have come once
_lasting: set[Packing] = set()  # of weights that have come again
_captured: dict[int, StorageWeakRef] = {}  # weights that a CUDA graph reads, and may write
_lock = threading.Lock()


def packed_weights(w: torch.Tensor, packing: Packing) -> torch.Tensor:
    """The packed weights of ``w`` (C_in, C_out/groups, K), ready on the current stream.

    They are kept from the second time on that the same weights come, or, after many that came once, from one of the
    next times on: weights that are computed anew for each call, as by weight normalisation, come once. Remembered by
    storage, place in it and ``w._version``, which every in-place operation of torch raises; a write that torch does not
    count (through ``w.data``, which has a count of its own, foreign code, or a CUDA graph of the optimizer's step
    alone) is not seen. Inside a graph's capture the weights are packed anew, so that a replay packs what they are by
    then; and from then on at every call, since replays that include the optimizer's step write them uncounted. So are
    those in float64: gradcheck writes them uncounted.
    """
    if w.dtype == torch.float64 or SIMULATOR:
        return _pack(w, packing)
    once = _once.get(packing, 0)
    rarely = once >= PATIENCE and (once + 1) % SELDOM and packing not in _lasting
    if rarely and not torch.cuda.is_current_stream_capturing():
        _once[packing] = once + 1
        return _pack(w, packing)
    try:
        version = w._version
    except RuntimeError:  # of inference mode: it is not counted
        return _pack(w, packing)
    storage, index = w.untyped_storage(), packing.weights.index
    identity = storage._cdata
    if torch.cuda.is_current_stream_capturing():
        _capture(identity, storage)
    if identity in _captured:
        return _pack(w, packing)
    place = identity, w.storage_offset()
    kept = _kept.get(place)
    if kept is not None and kept.version != version:  # of weights that are no more
        _kept.pop(place, None)
        kept = None
    packed = kept.packed.get(packing) if kept else None
    new = packed is None and _is_new(w.data_ptr(), packing, version, storage)
    if new or _warming_up(index):
        return _pack(w, packing)
    if packed is None:
        packed = _Packed(_pack(w, packing), torch._C._cuda_getCurrentRawStream(index), torch.cuda.Event())
        packed.ready.record()
        _keep(place, version, storage, packing, packed)
    elif packed.stream != torch._C._cuda_getCurrentRawStream(index):
        torch.cuda.current_stream().wait_event(packed.ready)
        packed.weights.record_stream(torch.cuda.current_stream())
    return packed.weights


def _keep(
    place: tuple[int, int], version: int, storage: torch.UntypedStorage, packing: Packing, packed: _Packed
) -> None:
    """In the place of what is of weights that are gone, and of the oldest beyond MOST_PACKINGS."""
    with _lock:
        for old in [k for k, v in _kept.items() if v.storage.expired()]:
            del _kept[old]
        kept = _kept.get(place)
        if kept is None or kept.version != version:
            kept = _kept[place] = _Kept(version, StorageWeakRef(storage), {})
        while len(kept.packed) >= MOST_PACKINGS:
            del kept.packed[next(iter(kept.packed))]
        kept.packed[packing] = packed
        _lasting.add(packing)


def _capture(identity: int, storage: torch.UntypedStorage) -> None:
    with _lock:
        for old in [k for k, v in _captured.items() if v.expired()]:
            del _captured[old]
        _captured[identity] = StorageWeakRef(storage)


def _is_new(address: int, packing: Packing, version: int, storage: torch.UntypedStorage) -> bool:
    """Whether these weights come for the first time as they are, so far as it is remembered."""
    key = address, packing
    seen = _new.get(key)
    if seen is not None and seen[0] == version and seen[1].cdata == storage._cdata:
        _once[packing] = 0
        return False
    once = _once[packing] = _once.get(packing, 0) + 1
    if once <= PATIENCE or once % SELDOM == 0:
        with _lock:
            if key in _new:
                _new.move_to_end(key)
            elif len(_new) >= MOST_NEW:
                _new.popitem(last=False)
            _new[key] = version, StorageWeakRef(storage)
    return True


def _warming_up(device: int) -> bool:
    """Whether torch.compile runs what it is about to capture: in the graph's memory, in which nothing may be kept."""
    trees, kept = sys.modules.get("torch._inductor.cudagraph_trees"), "tree_manager_containers"
    if trees is None or not (hasattr(trees.local, kept) or torch._C._is_key_in_tls(kept)):  # of this thread
        return False
    manager = trees.get_manager(device, create_if_none_exists=False)
    return manager is not None and manager.in_warmup


def _pack(w: torch.Tensor, packing: Packing) -> torch.Tensor:
    packed = packing.room()
    packing.launch(w, packed)
    return packed
