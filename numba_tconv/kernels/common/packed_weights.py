"""Weights in the order in which a rung reads them: packed in the call, or kept by the frozen layer that owns them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, cached_property
from typing import NamedTuple

import torch

from numba_tconv.runtime.kernel import Prepared, capture_ignored
from numba_tconv.runtime.layout import Layout, room


class Packing:
    """How weights that lie as ``weights`` are packed. Equal choices give one object (``unique``)."""

    weights: Layout
    size: int  # elements of the packed weights
    launch: Prepared  # takes the weights, and the room for the packed ones

    @cached_property
    def room(self) -> Callable[[], torch.Tensor]:
        return room((self.size,), self.weights.dtype, self.weights.index)

    def __call__(self, w: torch.Tensor) -> torch.Tensor:
        """Pack ``w`` (C_in, C_out/groups, K) on the current stream."""
        packed = self.room()
        self.launch(w, packed)
        return packed


_choosing = threading.Lock()


@cache
def _made(kind: type[Packing], *choices) -> Packing:
    return kind(*choices)


def unique(kind: type[Packing], weights: Layout, *choices) -> Packing:
    """The one packing with these choices, wherever the weights begin."""
    with _choosing:  # threads that ask for the first time together get one object, too
        return _made(kind, weights._replace(offset=0), *choices)


class _Packed(NamedTuple):
    weights: torch.Tensor
    stream: int | None  # None without a GPU
    ready: torch.cuda.Event | None


class FrozenWeights:
    """Weights (C_in, C_out/groups, K) that do not change, and what has been packed of them.

    ``tensor`` goes to the operator in the place of the parameter. A rung that packs finds the packed weights by this
    tensor object; a copy, cast or view of it is packed in the call like any other tensor. The packed weights are freed
    with the tensor.
    """

    def __init__(self, weights: torch.Tensor):
        self.tensor = weights.detach()  # an object of its own, on the same memory
        self.tensor.packings = self._packings = _Packings()

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights that are kept."""
        return sum(one.weights.nbytes for one in list(self._packings.kept.values()))


class _Packings:
    """The packed forms of one tensor."""

    def __init__(self):
        self.kept: dict[Packing, _Packed] = {}
        self._lock = threading.Lock()

    def packed(self, w: torch.Tensor, packing: Packing) -> torch.Tensor:
        """``w`` in the order of ``packing``, ready on the current stream; packed at the first call for each order."""
        on_gpu = packing.weights.index >= 0
        stream = torch._C._cuda_getCurrentRawStream(packing.weights.index) if on_gpu else None
        known = self.kept.get(packing)
        if on_gpu and torch.cuda.is_current_stream_capturing():
            # A graph cannot wait for what is outside of it, and what it allocates is its own: it takes packed weights
            # that are there already, or packs them at each replay.
            with capture_ignored():
                is_there = known is not None and known.ready.query()
            return known.weights if is_there else packing(w)
        known = known or self._make(w, packing, stream)
        if known.stream != stream:
            current = torch.cuda.current_stream()
            current.wait_event(known.ready)
            known.weights.record_stream(current)
        return known.weights

    def _make(self, w: torch.Tensor, packing: Packing, stream: int | None) -> _Packed:
        with self._lock:
            if packing not in self.kept:  # another thread may have been faster
                packed = _Packed(packing(w), stream, None if stream is None else torch.cuda.Event())
                if packed.ready is not None:
                    packed.ready.record()
                self.kept[packing] = packed
            return self.kept[packing]


def packed_weights(w: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, bool]:
    """``w`` (C_in, C_out/groups, K) in the order of ``packing``, ready on the current stream, and whether it was packed
    now, by the stream's newest launch.

    Packed now, whatever was packed before: torch does not tell when the values of a tensor change. Only the tensor of a
    FrozenWeights is packed once for each order.
    """
    packings = getattr(w, "packings", None)
    return (packing(w), True) if packings is None else (packings.packed(w, packing), False)


def after_packing(packing: Packing, launch: Prepared) -> Callable[..., None]:
    """``launch`` of (x, packed weights, bias, y) as a function of (x, w, bias, y).

    An early launch must follow the packing: its kernel reads everything else before it waits (Kernel.prepare), and a
    kernel of someone else's that came before it may still write x.
    """
    ordinary = launch.ordinary

    def pack_and_launch(x, w, bias, y):
        packed, now = packed_weights(w, packing)
        (launch if now else ordinary)(x, packed, bias, y)

    return pack_and_launch
