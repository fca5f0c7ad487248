"""Boxes of x: the copy engine fetches a window in one box, however x's rows are aligned.

A tensor map needs multiples of 16 bytes. Every ``alike``-th row of x (a power of two) is aligned alike. One map
dimension is these rows; another is the rows between, with x's stride less ``shear`` elements. Channel c begins
``shear`` * (c % alike) elements into its box row. Outside the signal consumers put zeros, or the copy engine where
windows are ``aligned``."""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from numba import int32

from numba_tconv.kernels.common.tensor_core.fragments import column_of
from numba_tconv.kernels.common.tensor_map import ALIGNMENT, LARGEST_BOX, encode, row_bytes, rows_alike
from numba_tconv.ptx import device_function

from .arguments import Window
from .tile import Config

SPARE = 32  # most elements added against bank conflicts


@dataclass(frozen=True)
class RowAlignment:
    """How an input's rows lie."""

    alike: int = 1  # rows to the next of the same alignment
    shear: int = 0  # elements between rows' starts, modulo 16 bytes
    aligned: bool = True  # windows are 16-byte aligned


@lru_cache(maxsize=1024)
def geometry(config: Config, rows: RowAlignment | None) -> Window:
    """A stage's windows; ``rows`` None (filled row by row) counts as aligned."""
    rows, tile = rows or RowAlignment(), config.tile
    itemsize = tile.itemsize
    pitch = (config.pitch if rows.aligned else _pitch(config, rows)) * itemsize
    region = config.region(pitch)
    stage_bytes = config.stage_bytes_of(region)
    stages = min(config.stages, config.ring_bytes // stage_bytes)
    return Window(rows.alike.bit_length() - 1, pitch, rows.shear * itemsize, region, stage_bytes, stages)


def row_alignment(shape: tuple, strides: tuple, offset: int, config: Config, groups: int) -> RowAlignment | None:
    """The alignment of an input (N, C_in, L), or None if no tensor map describes it.

    ``strides``: in elements. ``offset``: bytes past a 16-byte boundary."""
    tile, in_part = config.tile, shape[1] // (groups * config.splits)
    vector = ALIGNMENT // tile.itemsize
    if groups > 1 and in_part % config.depth:
        return None  # a stage must not read the next group
    alike = rows_alike(shape, strides, tile.itemsize)
    if not alike or in_part % alike:
        return None  # a box would pass the last channel, or span split-K parts
    aligned = alike == 1 and not offset and tile.chunk_shift % vector == 0
    rows = RowAlignment(alike, strides[1] % vector if alike > 1 else 0, aligned)
    if alike > 1 and rows.shear == strides[1]:
        return None  # rows would overlap
    return rows if aligned or _narrowest(config, rows) <= LARGEST_BOX else None


def _narrowest(config: Config, rows: RowAlignment) -> int:
    """The fewest elements of a box's row."""
    vector = ALIGNMENT // config.tile.itemsize
    return -(-(config.width + vector - 1 + (rows.alike - 1) * rows.shear) // vector) * vector


@lru_cache(maxsize=1024)
def _pitch(config: Config, rows: RowAlignment) -> int:
    """Elements of a box's row, against bank conflicts."""
    narrowest, vector = _narrowest(config, rows), ALIGNMENT // config.tile.itemsize
    pitches = range(narrowest, min(narrowest + SPARE, LARGEST_BOX) + 1, vector)
    return min(pitches, key=lambda pitch: wavefronts(config, rows, pitch))


def wavefronts(config: Config, rows: RowAlignment, pitch: int) -> int:
    """Wavefronts of a warp's first load; ``pitch`` in elements."""
    itemsize = config.tile.itemsize
    words = max(1, gcd(4, rows.shear) * itemsize // 4)
    log = rows.alike.bit_length() - 1
    taken = defaultdict(set)
    for lane in range(32):
        channel = lane % 4 * (4 // itemsize)
        element = place.py_func(channel, log, pitch, rows.shear) + column_of(0, lane, 0, 0)
        for word in range(words):
            at = int(element) * itemsize // 4 + word
            taken[lane * words // 32, at % 32].add(at)
    return sum(max(len(taken[wavefront, bank]) for bank in range(32)) for wavefront in range(words))


def template_map(shape: tuple, strides: tuple, offset: int, config: Config, rows: RowAlignment) -> tuple[int, ...]:
    """An input's tensor map as 64-bit words, without address."""
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
    """Where channel ``c`` begins in a window, in the unit of ``pitch``."""
    return int32(c * pitch + (c & ((1 << alike_log) - 1)) * shear)
