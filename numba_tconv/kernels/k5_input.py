"""How k5 takes its input: as it lies, or copied first into rows that begin at multiples of 16 bytes.

From other rows cp.async copies single elements, and those of 16 bits, which it cannot, go through registers. An odd
length then takes 1.4 to 2.2 times as long as the even one beside it (kb79, hifigan_u4, demucs_out), and convtasnet's
ten times (H200, bfloat16, a script; no recorded rows), while a copy takes half a millisecond a gigabyte. Elements of 32
bits are copied first only where the neighbours of a row are apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .tensor_map import row_pitch, to_rows
from .tensor_rung import by_vectors
from .tensor_tile import Tile

FEWEST_BYTES = 16 << 20  # of x: below, one more launch takes about as long as it saves
Taken = tuple[tuple, int, Callable[[torch.Tensor], torch.Tensor] | None]


def input_of(shape: tuple, strides: tuple, offset: int, tile: Tile) -> Taken:
    """Strides, in elements, of the input (N, C_in, L) that the kernel reads, bytes by which it begins after a multiple
    of 16, and what must be done to x before, if anything; of an x that lies as told."""
    pitch = row_pitch(shape[2], tile.itemsize)
    rows, large = (shape[1] * pitch, pitch, 1), math.prod(shape) * tile.itemsize >= FEWEST_BYTES
    slow = not by_vectors(shape, strides, offset, tile) and (tile.itemsize == 2 or strides[2] != 1)
    if large and slow and by_vectors(shape, rows, 0, tile):
        return rows, 0, to_rows
    return strides, offset, None
