"""Boxes of x: how the copy engine fetches a window of k6 at once, wherever the rows of x begin in memory.

A tensor map wants its tensor and the tensor's strides at multiples of 16 bytes, and each box must begin at one. The
rows of x are where they are; but every ``alike``-th row (a power of two) begins alike. So the map shows x sheared: one
of its dimensions is every ``alike``-th row; another one is the rows between two of those, and its stride is that of x
less ``shear`` elements, which makes it a multiple of 16 bytes. Each of these rows stands ``shear`` elements further to
the right in the map than the one before, and one box that is so much wider holds the windows of all channels. Where it
is less wide for it, the rows between are two dimensions: ``low`` rows, and sets of so many, each of which stands
``high_shear`` elements, less than 16 bytes as well, further to the right than the set before.

What a box holds beyond the ends of a row is of its neighbours; the lanes that read a window take it for zeros
(k6_window.py). Of rows that all begin at multiples of 16 bytes the copy engine does that, and windows begin where their
boxes do (``aligned``).

Channel c of a stage stands in row c of the box, so many elements after the row's first (``place``).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache, lru_cache
from math import gcd

from numba import int32

from ..ptx import device_function
from .fragments import column_of
from .k6_config import Config
from .tensor_map import ALIGNMENT, LARGEST_BOX, LONGEST_STRIDE, encode, row_bytes, rows_alike

SPARE = 32  # elements by which a row of a box may be longer than it must, so that lanes read from different banks


@dataclass(frozen=True)
class Rows:
    """How the rows of an input lie."""

    alike: int = 1  # every how many begin alike, modulo 16 bytes
    shear: int = 0  # elements, of ALIGNMENT bytes, by which each of the next begins after the one before
    aligned: bool = True  # all windows begin at multiples of 16 bytes
    low: int = 1  # rows of which each begins ``shear`` after the one before
    high_shear: int = 0  # elements, of ALIGNMENT bytes, by which each set of so many begins after the one before

    @property
    def farthest(self) -> int:
        """Elements by which some row stands further to the right in the map than the first."""
        return (self.low - 1) * self.shear + (self.alike // self.low - 1) * self.high_shear


@cache
def sheared_rows(alike: int, shear: int, vector: int) -> Rows:
    """Those of which each begins ``shear`` elements after the one before, modulo ``vector``, in the sets of which a box
    is least wide."""
    sets = (2**z for z in range(alike.bit_length() - 1, 0, -1))
    found = (Rows(alike, shear, False, low, shear * low % vector) for low in sets)
    return min(found, key=lambda rows: rows.farthest)


@dataclass(frozen=True)
class Geometry:
    """Where the channels of a stage stand in shared memory; in bytes, but for ``alike``, ``low`` and ``stages``."""

    alike: int
    low: int
    shear: int  # by which a channel stands further into its row than the one before, of ``low``
    high_shear: int  # and each set of so many than the one before, of ``alike`` channels
    pitch: int  # from a row of a box to the next
    region: int  # of a window
    slot: int  # from a stage to the next
    stages: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """As a kernel takes them: powers of two as their logarithms. The first four are the ``shears`` of ``place``."""
        logs = self.alike.bit_length() - 1, self.low.bit_length() - 1
        return *logs, self.shear, self.high_shear, self.pitch, self.region, self.slot, self.stages


@lru_cache(maxsize=1024)
def geometry(config: Config, rows: Rows | None) -> Geometry:
    """That of windows of ``rows``; None (all windows are filled row by row) is as aligned ones."""
    rows, tile = rows or Rows(), config.tile
    itemsize = tile.itemsize
    pitch = (config.pitch if rows.aligned else _pitch(config, rows)) * itemsize
    region = config.region(pitch)
    slot = config.slot_of(region)
    shears, stages = (rows.shear * itemsize, rows.high_shear * itemsize), min(config.stages, config.ring_bytes // slot)
    return Geometry(rows.alike, rows.low, *shears, pitch, region, slot, stages)


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
    rows = sheared_rows(alike, strides[1] % vector, vector) if alike > 1 else Rows(aligned=aligned)
    overlapping = alike > 1 and (rows.shear == strides[1] or rows.high_shear == strides[1] * rows.low)
    if overlapping or alike * row_bytes(shape, strides, tile.itemsize)[1] >= LONGEST_STRIDE:
        return None
    return rows if aligned or _narrowest(config, rows) <= LARGEST_BOX else None


def _narrowest(config: Config, rows: Rows) -> int:
    """Elements that a row of a box must have."""
    vector = ALIGNMENT // config.tile.itemsize
    return -(-(config.width + vector - 1 + rows.farthest) // vector) * vector


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
    shears = rows.alike.bit_length() - 1, rows.low.bit_length() - 1, rows.shear, rows.high_shear
    taken = defaultdict(set)  # words in a bank, by turn: 128 bytes are asked for together
    for lane in range(32):
        channel = lane % 4 * (4 // itemsize)
        element = place.py_func(channel, pitch, shears) + column_of(0, lane, 0, 0)
        for word in range(words):
            at = int(element) * itemsize // 4 + word
            taken[lane * words // 32, at % 32].add(at)
    return sum(max(len(taken[turn, bank]) for bank in range(32)) for turn in range(words))


def template_map(shape: tuple, strides: tuple, offset: int, config: Config, rows: Rows) -> tuple[int, ...]:
    """The map, as 64-bit numbers, of an input as in ``rows_of``, wherever it is: the kernel puts in the address of the
    multiple of 16 bytes before its first element (``publish``)."""
    (batch, channels, length), itemsize = shape, config.tile.itemsize
    n_bytes, c_bytes = row_bytes(shape, strides, itemsize)
    low, high = rows.low, rows.alike // rows.low
    return encode(
        config.tile.precision,
        (length + offset // itemsize + rows.farthest, low, high, channels // rows.alike, batch),
        (c_bytes - rows.shear * itemsize, c_bytes * low - rows.high_shear * itemsize, c_bytes * rows.alike, n_bytes),
        (geometry(config, rows).pitch // itemsize, low, high, config.depth // rows.alike, 1),
    )


@device_function
def place(c, pitch, shears):
    """The byte of a window's region at which channel ``c`` of the stage begins, if the first begins the region;
    ``shears``: see ``Geometry.numbers``. With a pitch of 0: by how much it stands further into its row."""
    alike_log, low_log, shear, high_shear = shears
    low, high = c & ((1 << low_log) - 1), (c & ((1 << alike_log) - 1)) >> low_log
    return int32(c * pitch + low * shear + high * high_shear)
