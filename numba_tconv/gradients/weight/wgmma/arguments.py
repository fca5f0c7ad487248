"""Arguments beside TensorMaps (wgmma_ring.py)."""

from typing import NamedTuple


class Rows(NamedTuple):
    stride_c: int
    length: int
    channels: int
    first: int  # the element that tap 0 meets at position 0


class Grid(NamedTuple):
    group_rows: int
    group_channels: int
    pair_tiles: int
    channel_tiles: int
    tap_chunks: int
    tiles: int
    sample_stages: int
    all_stages: int
    splits: int


class Block(NamedTuple):
    split: int
    tile: int
    group: int
    pair_tile: int
    channel_tile: int


class Lane(NamedTuple):
    """How a consumer lane reads a stage; addresses in slot 0, one a row."""

    rows: tuple  # where its elements begin
    starts: tuple  # of rows to clear, or NOT_MINE
    flags: int  # the stages' flags
    first_cleared: int  # element; it clears every fourth from there
    before: int  # elements before a row's first
    barrier: int  # of warps that read a stage together
