"""What k4's kernel and its plan share by name. Offsets are in elements."""

from __future__ import annotations

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
    last_taps: int  # rows of a channel with the last tap


class Block(NamedTuple):
    shared: object
    base: int  # address of ``shared``
    offsets: object  # shared: where each vector of the window lies in x at channel 0; -1 outside the signal
    start: object  # shared: sample and column where the tile begins
    first_column: int  # over all samples
    group_offset: int  # the group's first channel in x
    tile_offset: int  # the row tile's first packed stage
    stages: int


class Lane(NamedTuple):
    """Where a thread's sums lie in the tile, and its operands in a stage."""

    row: int
    column: int
    weights: int
    window: int


class Registers(NamedTuple):
    sums: object
    window: object
    weights: object


class Stage(NamedTuple):
    """Shared memory, and the thread's operands in a stage."""

    shared: object
    window: int
    weights: int


class Progress(NamedTuple):
    """The next stage to multiply; tap chunk and input channel of the next to copy."""

    stage: int
    chunk: int
    channel: int


class OutputTile(NamedTuple):
    shared: object
    start: object  # as in Block
    first_channel: int  # of all groups
    channels: int
    first_phase: int
