"""What the kernel of a step takes."""

from __future__ import annotations

from typing import NamedTuple


class Mask(NamedTuple):
    """A byte a slot, 0 where the slot rests; any tensor of its type where it does not exist."""

    data: object
    exists: bool


class Stream(NamedTuple):
    """Sizes of a step, and how its blocks share the slots and the new frames."""

    batch: int
    frames: int  # new ones
    groups: int
    slot_tiles: int
    frame_tiles: int
    readers: int  # blocks that read the same part of the state


class Columns(NamedTuple):
    """Sizes of a step on tensor cores, and how its blocks share the slots."""

    batch: int
    frames: int  # new ones
    groups: int
    in_per_group: int
    out_per_group: int
    slots: int  # of a block
    slot_tiles: int
    row_tiles: int  # of a group, whose blocks read the same frames


class Place(NamedTuple):
    """What a block on tensor cores reads first."""

    first_slot: int
    first_in: int  # input channel of its group
