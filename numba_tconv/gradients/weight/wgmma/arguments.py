"""What host and device share by name in grad_weight_wgmma, beside TensorMaps (gradients/wgmma_ring.py)."""

from __future__ import annotations

from typing import NamedTuple

from numba import types

from numba_tconv.runtime.kernel import named


class Rows(NamedTuple):
    """grad_output, or its planes."""

    stride_c: int
    length: int
    channels: int  # of all groups; of planes: their rows
    first: int  # the element that tap 0 meets at position 0


class Grid(NamedTuple):
    """How the sums are dealt out to blocks."""

    group_rows: int  # of grad_output or its planes
    group_channels: int  # input channels
    pair_tiles: int
    channel_tiles: int
    tap_chunks: int
    tiles: int  # of one split
    sample_stages: int
    all_stages: int
    splits: int


class Block(NamedTuple):
    """A block's split and tile."""

    split: int
    tile: int
    group: int
    pair_tile: int
    channel_tile: int
    first_element: int  # of a row, which the chunk's first tap meets at position 0


class Lane(NamedTuple):
    """How a consumer lane reads a stage. Addresses are those in slot 0, one for each of its rows."""

    rows: tuple  # where its elements begin
    starts: tuple  # where the rows that it clears begin, or NOT_MINE
    flags: int  # address of the stages' flags
    first_cleared: int  # the first element of a row that it clears, of every fourth
    before: int  # elements before a row's first
    barrier: int  # named barrier of the warps that read a stage together


ROWS = named(Rows, **dict.fromkeys(Rows._fields, types.int64))
GRID = named(Grid, **dict.fromkeys(Grid._fields, types.int64))
