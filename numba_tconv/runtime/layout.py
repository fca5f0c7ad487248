"""How tensors lie in memory."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

NO_GPU = -1
PLACES = 32  # bytes; torch's tensors begin at multiples

# Allocates without torch's dispatcher.
_empty_on_gpu = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def layout_of(tensor: torch.Tensor) -> tuple:
    """The Layout as a plain tuple, a cheap key."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() % PLACES


class Layout(NamedTuple):
    """``strides``: in elements; ``index``: torch's GPU, negative for none; ``offset``: the address modulo PLACES."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    index: int
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        return cls(*layout_of(tensor))

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype, index: int) -> "Layout":
        """The layout that torch allocates."""
        return cls(tuple(shape), _strides(shape), dtype, index, 0)

    @property
    def is_contiguous(self) -> bool:
        wanted = _strides(self.shape)
        return all(own == w or n == 1 for n, own, w in zip(self.shape, self.strides, wanted, strict=True))

    @property
    def is_dense(self) -> bool:
        """Contiguous in some order of its dimensions."""
        strides, shape = zip(*sorted(zip(self.strides, self.shape, strict=True), reverse=True), strict=True)
        return self._replace(shape=shape, strides=strides).is_contiguous


def room(shape: tuple[int, ...], dtype: torch.dtype, index: int) -> Callable[[], torch.Tensor]:
    """A function that allocates a contiguous tensor on GPU ``index``, which must be current (CPU if negative)."""
    if index < 0:
        return partial(torch.empty, shape, dtype=dtype)
    if _empty_on_gpu is None:
        return partial(torch.empty, shape, dtype=dtype, device=torch.device("cuda", index))
    return partial(_empty_on_gpu, tuple(shape), _strides(shape), dtype)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
