"""Weights in a rung's order: packed in every call, or kept by a frozen layer."""

import threading
from collections.abc import Callable
from functools import cache, cached_property
from typing import NamedTuple

import torch

from numba_tconv.runtime.kernel import Prepared, capture_ignored
from numba_tconv.runtime.layout import Layout, room


class Packing:
    """How weights of one layout are packed; made by ``unique``."""

    weights: Layout
    size: int  # packed elements
    launch: Prepared  # of (w, packed)

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
    """One packing for equal choices, wherever weights begin. Thread-safe."""
    with _choosing:
        return _made(kind, weights._replace(offset=0), *choices)


class _Packed(NamedTuple):
    weights: torch.Tensor
    stream: int | None  # None without a GPU
    ready: torch.cuda.Event | None


class FrozenWeights:
    """Constant weights (C_in, C_out/groups, K), with their packed forms.

    Pass ``tensor`` to the operator as the weight. Its copies, casts and views are packed in every call."""

    def __init__(self, weights: torch.Tensor):
        self.tensor = weights.detach()
        self.tensor.packings = self._packings = _Packings()

    @property
    def packed_bytes(self) -> int:
        return sum(one.weights.nbytes for one in list(self._packings.kept.values()))


class _Packings:
    def __init__(self):
        self.kept: dict[Packing, _Packed] = {}
        self._lock = threading.Lock()

    def __reduce__(self):
        return type(None), ()  # a pickled tensor is packed in every call

    def packed(self, w: torch.Tensor, packing: Packing) -> torch.Tensor:
        on_gpu = packing.weights.index >= 0
        stream = torch._C._cuda_getCurrentRawStream(packing.weights.index) if on_gpu else None
        known = self.kept.get(packing)
        if on_gpu and torch.cuda.is_current_stream_capturing():
            # A graph cannot wait for an outside event: unless weights are ready, it packs at each replay.
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
            if packing not in self.kept:
                packed = _Packed(packing(w), stream, None if stream is None else torch.cuda.Event())
                if packed.ready is not None:
                    packed.ready.record()
                self.kept[packing] = packed
            return self.kept[packing]


def packed_weights(w: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, bool]:
    """Pack ``w``: frozen weights once, others in every call, as their values may change.

    Returns packed weights, ready on the current stream, and whether its newest launch packed them."""
    packings = getattr(w, "packings", None)
    return (packing(w), True) if packings is None else (packings.packed(w, packing), False)


def after_packing(packing: Packing, launch: Prepared) -> Callable[..., None]:
    """Build a function (x, w, bias, y) that packs w where needed and calls ``launch``.

    Frozen weights take the ordinary launch: an early one reads x before it waits (Kernel.prepare), while the kernel
    before may write x."""
    ordinary, room, pack = launch.ordinary, packing.room, packing.launch

    def pack_and_launch(x, w, bias, y):
        if (packings := getattr(w, "packings", None)) is None:
            packed = room()
            pack(w, packed)
            launch(x, packed, bias, y)
        else:
            ordinary(x, packings.packed(w, packing), bias, y)

    return pack_and_launch
