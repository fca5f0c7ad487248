"""Arguments and shared tuples. Offsets are in elements."""

from typing import NamedTuple


class Sizes(NamedTuple):
    batch: int
    length: int
    out_length: int
    in_per_group: int
    out_per_group: int
    groups: int
    padding: int


class Grid(NamedTuple):
    columns: int
    first_column: int
    row_tiles: int
    tap_chunks: int
    channel_chunks: int
    full_phases: int  # phases with the last tap


class Block(NamedTuple):
    shared: object
    base: int  # address of ``shared``
    offsets: object  # shared: the window's vectors in x at channel 0; -1 outside the signal
    start: object  # shared: the tile's sample and column
    first_column: int  # over all samples
    group_offset: int  # in x
    tile_offset: int  # of packed weights
    stages: int


class Lane(NamedTuple):
    """A thread's sums in the tile, and operands in a stage."""

    row: int
    column: int
    weights: int
    window: int


class Registers(NamedTuple):
    sums: object
    window: object
    weights: object


class Stage(NamedTuple):
    """Addresses of a thread's operands in a stage."""

    shared: object
    window: int
    weights: int


class Progress(NamedTuple):
    """The next stage to multiply; chunk and channel to copy."""

    stage: int
    chunk: int
    channel: int
