"""What host and device share by name in grad_input_wgmma, beside TensorMaps (wgmma_ring.py)."""

from __future__ import annotations

from typing import NamedTuple

from numba import types

from numba_tconv.runtime.kernel import named


class Shape(NamedTuple):
    """grad_input, and where its positions meet grad_output."""

    first: int  # the element that tap 0 meets at position 0
    length: int
    groups: int
    group_rows: int  # of grad_output's map, a group
    group_channels: int


class Grid(NamedTuple):
    position_tiles: int
    channel_tiles: int
    tiles: int  # parts of tiles, in all
    tile_stages: int  # of a part


class GradRows(NamedTuple):
    shear: int  # elements between rows of a sheared map
    length: int  # elements, beyond which windows are cleared


class Place(NamedTuple):
    sample: int
    group: int
    part: int  # of its stages
    channel_tile: int
    position: int  # the first


class Window(NamedTuple):
    """How a consumer lane reads its windows. Tuples are local arrays."""

    rows: tuple  # addresses of its positions in slot 0
    places: tuple  # of its entries in a stage, in bytes from a position
    first_entry: int
    table: int  # address of its first entry
    phase: tuple  # one number: of the next stage, in bytes of the table


class Ends(NamedTuple):
    """Elements beside the signal, which count as zero. Tuples are local arrays."""

    reached: int  # whether the warp meets it in this tile
    first: tuple  # the elements that tap 0 meets at the lane's positions
    meets: tuple  # bit masks of the next stage's entries, then of this one's
    length: int


class Lane(NamedTuple):
    window: Window
    ends: Ends


SHAPE = named(Shape, **dict.fromkeys(Shape._fields, types.int64))
GRID = named(Grid, **dict.fromkeys(Grid._fields, types.int64))
GRAD_ROWS = named(GradRows, **dict.fromkeys(GradRows._fields, types.int64))
