"""Boxes of x: how the copy engine fetches a window of k6 at once, wherever the rows of x begin in memory.

A tensor map wants its tensor and the tensor's strides at multiples of 16 bytes, and each box must begin at one. The
rows of x are where they are; but every ``alike``-th row (a power of two) begins alike. So the map shows x sheared: one
of its dimensions is every ``alike``-th row; another one is the rows between two of those, and its stride is that of x
less ``shear`` elements, which makes it a multiple of 16 bytes. Each of these rows stands ``shear`` elements further to
the right in the map than the one before, and one box that is so much wider holds the windows of all channels.

What a box holds beyond the ends of a row is of its neighbours; the lanes that read a window take it for zeros
(window.py). Of rows that all begin at multiples of 16 bytes the copy engine does that, and windows begin where their
boxes do (``aligned``).

Channel c of a stage stands in row c of the box, ``shear`` * (c % alike) elements after the row's first.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from numba import int32

from numba_tconv.kernels.common.tensor_core.fragments import column_of
from numba_tconv.kernels.common.tensor_map import ALIGNMENT, LARGEST_BOX, LONGEST_STRIDE, encode, row_bytes, rows_alike
from numba_tconv.ptx import device_function

from .tile import Config

SPARE = 32  # elements by which a row of a box may be longer than it must, so that lanes read from different banks


@dataclass(frozen=True)
class Rows:
    """How the rows of an input lie."""

    alike: int = 1  # every how many begin alike, modulo 16 bytes
    shear: int = 0  # elements, of ALIGNMENT bytes, by which each of those begins after the one before
    aligned: bool = True  # all windows begin at multiples of 16 bytes


@dataclass(frozen=True)
class Geometry:
    """Where the channels of a stage stand in shared memory; in bytes, but for ``alike`` and ``stages``."""

    alike: int
    pitch: int  # from a row of a box to the next
    shear: int  # by which a channel stands further into its row than the one before, if it begins unlike that
    region: int  # of a window
    slot: int  # from a stage to the next
    stages: int


@lru_cache(maxsize=1024)
def geometry(config: Config, rows: Rows | None) -> Geometry:
    """That of windows of ``rows``; None (all windows are filled row by row) is as aligned ones."""
    rows, tile = rows or Rows(), config.tile
    itemsize = tile.itemsize
    pitch = (config.pitch if rows.aligned else _pitch(config, rows)) * itemsize
    region = config.region(pitch)
    slot = config.slot_of(region)
    return Geometry(
        rows.alike,
        pitch,
        rows.shear * itemsize,
        region,
        slot,
        min(config.stages, config.ring_bytes // slot),
    )


def rows_of(shape: tuple, strides: tuple, offset: int, config: Config, groups: int) -> Rows | None:
    """How the rows of an input (N, C_in, L) lie, ``strides`` in elements, that begins ``offset`` bytes after a multiple
    of 16; None if a tensor map cannot describe them."""
    tile, in_part = config.tile, shape[1] // (groups * config.splits)
    vector = ALIGNMENT // tile.itemsize
    if groups > 1 and in_part % config.depth:
        return None  # a stage must not take channels of the next group; of the next part of the same one it may
    alike = rows_alike(shape, strides, tile.itemsize)
    if not alike or in_part % alike:
        return None  # what is behind the last channel would be fetched with it; and each part begins a box's first row
    aligned = alike == 1 and not offset and tile.chunk_shift % vector == 0
    rows = Rows(alike, strides[1] % vector if alike > 1 else 0, aligned)
    overlapping = alike > 1 and rows.shear == strides[1]
    if overlapping or alike * row_bytes(shape, strides, tile.itemsize)[1] >= LONGEST_STRIDE:
        return None
    return rows if aligned or _narrowest(config, rows) <= LARGEST_BOX else None


def _narrowest(config: Config, rows: Rows) -> int:
    """Elements that a row of a box must have."""
    vector = ALIGNMENT // config.tile.itemsize
    return -(-(config.width + vector - 1 + (rows.alike - 1) * rows.shear) // vector) * vector


@lru_cache(maxsize=1024)
def _pitch(config: Config, rows: Rows) -> int:
    """Elements of a row of a box: those with which the lanes of a warp meet in as few banks as possible."""
    narrowest, vector = _narrowest(config, rows), ALIGNMENT // config.tile.itemsize
    pitches = range(narrowest, min(narrowest + SPARE, LARGEST_BOX) + 1, vector)
    return min(pitches, key=lambda pitch: wavefronts(config, rows, pitch))


def wavefronts(config: Config, rows: Rows, pitch: int) -> int:
    """Turns in which a warp's load of its windows' first elements is served; ``pitch`` in elements."""
    itemsize = config.tile.itemsize
    words = max(1, gcd(4, rows.shear) * itemsize // 4)  # of a lane's load
    log = rows.alike.bit_length() - 1
    taken = defaultdict(set)  # words in a bank, by turn: 128 bytes are asked for together
    for lane in range(32):
        channel = lane % 4 * (4 // itemsize)
        element = place.py_func(channel, log, pitch, rows.shear) + column_of(0, lane, 0, 0)
        for word in range(words):
            at = int(element) * itemsize // 4 + word
            taken[lane * words // 32, at % 32].add(at)
    return sum(max(len(taken[turn, bank]) for bank in range(32)) for turn in range(words))


def template_map(shape: tuple, strides: tuple, offset: int, config: Config, rows: Rows) -> tuple[int, ...]:
    """The map, as 64-bit numbers, of an input as in ``rows_of``, wherever it is: the kernel puts in the address of the
    multiple of 16 bytes before its first element (``publish``)."""
    (batch, channels, length), itemsize = shape, config.tile.itemsize
    n_bytes, c_bytes = row_bytes(shape, strides, itemsize)
    return encode(
        config.tile.precision,
        (length + offset // itemsize + (rows.alike - 1) * rows.shear, rows.alike, channels // rows.alike, batch),
        (c_bytes - rows.shear * itemsize, c_bytes * rows.alike, n_bytes),
        (geometry(config, rows).pitch // itemsize, rows.alike, config.depth // rows.alike, 1),
    )


@device_function
def place(c, alike_log, pitch, shear):
    """The byte of a window's region at which channel ``c`` of the stage begins, if the first begins the region."""
    return int32(c * pitch + (c & ((1 << alike_log) - 1)) * shear)
