"""A result that can be computed at once: the rung is chosen, its launches are prepared, the result's room is known."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import device
from .layout import room


class Ready:
    """What computes a result of operands that lie as those it was made for, on the GPU that torch calls ``index``.

    ``shape`` and ``dtype`` are the result's, which is contiguous; ``fill`` takes the operands and the result.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, index: int, fill: Callable[..., None]):
        self.index, self.room, self.fill = index, room(shape, dtype, index), fill

    def __call__(self, *operands: torch.Tensor | None) -> torch.Tensor:
        if device.is_current(self.index):
            result = self.room()
            self.fill(*operands, result)
            return result
        with torch.cuda.device(self.index):
            return self(*operands)
