"""A prepared computation."""

from collections.abc import Callable

import torch

from . import device
from .layout import room


class Ready:
    """Computes a contiguous result by ``fill(*operands, result)``, for operands of fixed layouts."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, index: int, fill: Callable[..., None]):
        self.index, self.room, self.fill = index, room(shape, dtype, index), fill

    def __call__(self, *operands: torch.Tensor | None) -> torch.Tensor:
        if device.is_current(self.index):
            result = self.room()
            self.fill(*operands, result)
            return result
        with torch.cuda.device(self.index):
            return self(*operands)
