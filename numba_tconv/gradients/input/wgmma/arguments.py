"""Arguments beside TensorMaps (wgmma_ring.py)."""

from typing import NamedTuple


class Shape(NamedTuple):
    first: int  # the element that tap 0 meets at position 0
    length: int
    groups: int
    group_rows: int  # of grad_output's map
    group_channels: int


class Grid(NamedTuple):
    position_tiles: int
    channel_tiles: int
    tiles: int  # in all splits
    tile_stages: int


class GradRows(NamedTuple):
    shear: int  # elements between rows of a sheared map
    length: int  # elements; windows are cleared beyond


class Tile(NamedTuple):
    sample: int
    group: int
    split: int
    channel_tile: int
    position: int


class Window(NamedTuple):
    """How a consumer lane reads windows; tuples are local arrays."""

    rows: tuple  # addresses of its positions in slot 0
    places: tuple  # of a stage's entries, in bytes from a position
    first_entry: int
    table: int  # address of its first entry
    phase: tuple  # one number: the next stage's, in bytes of the table


class Ends(NamedTuple):
    """Elements beside the signal, counted as zero; tuples are local arrays."""

    reached: int  # by the warp, in this tile
    first: tuple  # elements that tap 0 meets at the lane's positions
    meets: tuple  # masks of the next stage's entries, then this one's
    length: int


class Lane(NamedTuple):
    window: Window
    ends: Ends
