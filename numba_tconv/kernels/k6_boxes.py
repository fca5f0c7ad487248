"""Boxes of x: how the copy engine fetches a window of k6, wherever the rows of x begin in memory.

A tensor map wants its tensor and the tensor's strides at multiples of 16 bytes, and each box must begin at one. The
rows of x are where they are; but every ``boxes``-th row (a power of two) lies alike. So x has ``boxes`` tensor maps,
each of every ``boxes``-th channel, from the 16-byte boundary before its first row on. Then a window begins up to 15
bytes within its box, ``early`` elements, which are not the same for all rows.

Channel c of a stage stands in box c % boxes, whose row is c // boxes. Boxes stand at multiples of 128 bytes, so that
rows of different boxes would lie in the same banks; therefore box b begins a few columns to the left, by ``shift``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from numba import int32

from ..ptx import device_function
from .k6_config import Config
from .tensor_map import ALIGNMENT, LARGEST_BOX, LONGEST_STRIDE, encode, row_bytes, rows_alike


@dataclass(frozen=True)
class Geometry:
    """Where the channels of a stage stand in shared memory; in bytes, but for ``boxes``."""

    boxes: int
    pitch: int  # from a row of a box to the next
    spacing: int  # from a box to the next
    shift_step: int  # by which the columns of a box stand further to the right than those of the one (pair) before
    slot: int  # from a stage to the next
    stages: int


@lru_cache(maxsize=1024)
def geometry(config: Config, boxes: int) -> Geometry:
    """That of stages with ``boxes`` boxes; 0 (all windows are filled row by row) is as 1."""
    boxes = max(1, boxes)
    itemsize, slot = config.tile.itemsize, config.slot(boxes)
    pairs = max(1, boxes * itemsize // 4)  # boxes, or pairs of them, whose rows a quarter-warp reads together
    return Geometry(
        boxes,
        config.pitch(boxes) * itemsize,
        config.spacing(boxes),
        config.bank_shift(boxes) // pairs * itemsize if boxes > 1 else 0,
        slot,
        min(config.stages, config.ring_bytes // slot),
    )


def boxes_of(shape: tuple, strides: tuple, offset: int, config: Config, groups: int) -> int:
    """How many tensor maps it takes to describe an input (N, C_in, L), ``strides`` in elements, that begins ``offset``
    bytes after a multiple of 16; 0 if they cannot. With 1, all windows begin where their boxes do."""
    channels, tile = shape[1], config.tile
    in_part = channels // (groups * config.splits)
    if groups > 1 and in_part % tile.depth:
        return 0  # a stage must not take channels of the next group; of the next part of the same one it may
    boxes = rows_alike(shape, strides, tile.itemsize)
    if not boxes:
        return 0
    if offset or tile.chunk_shift * tile.itemsize % ALIGNMENT:
        boxes = max(2, boxes)
    if config.splits > 1 and in_part % boxes:
        return 0  # every part must begin in the first box
    if boxes > channels or boxes * row_bytes(shape, strides, tile.itemsize)[1] >= LONGEST_STRIDE:
        return 0
    return boxes if config.pitch(boxes) <= LARGEST_BOX else 0


def template_map(shape: tuple, strides: tuple, offset: int, config: Config, boxes: int) -> tuple[int, ...]:
    """The map of the first box's channels, as 64-bit numbers, of an input as in ``boxes_of``, wherever it is: the
    kernel puts in the addresses (``publish``)."""
    (batch, channels, length), itemsize = shape, config.tile.itemsize
    n_bytes, c_bytes = row_bytes(shape, strides, itemsize)
    return encode(
        config.tile.precision,
        (length + offset // itemsize, -(-channels // boxes), batch),
        (c_bytes * boxes, n_bytes),
        (config.pitch(boxes), config.tile.depth // boxes, 1),
    )


def make_place(config: Config):
    """A device function: the byte of a stage's box region at which channel ``c`` of the stage begins its column 0."""
    paired = 4 // config.tile.itemsize  # channels that share a register, whose boxes are shifted alike

    @device_function
    def place(c, boxes_log, pitch, spacing, shift_step):
        box = int32(c & ((1 << boxes_log) - 1))
        return int32(box * spacing + (c >> boxes_log) * pitch + (box >> (paired - 1)) * shift_step)

    return place


def make_box_start(config: Config):
    """A device function: where in its rows the box begins that holds a window whose column 0 is element ``i`` of the
    rows. ``x_early``: elements by which x begins after a multiple of 16 bytes."""
    itemsize = config.tile.itemsize
    vector, paired = ALIGNMENT // itemsize, 4 // itemsize

    @device_function
    def box_start(i, box, x_early, stride_c, shift_step):
        begin = int32(i + (int32(x_early + box * stride_c) & (vector - 1)))
        return int32((begin & -vector) - (box >> (paired - 1)) * (shift_step // itemsize))

    return box_start
