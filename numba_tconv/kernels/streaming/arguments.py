"""Arguments of the kernels of steps."""

from typing import NamedTuple

from numba import types, uint8

from numba_tconv.kernels.common.arguments import Bias, Signal, Weights, arguments
from numba_tconv.runtime.kernel import flat


class Mask(NamedTuple):
    """A byte a slot, 0 where it rests; without a mask ``data`` is any tensor."""

    data: object
    exists: bool


def signature_of(storage: types.Type, *others: types.Type) -> tuple:
    """x, state, weights, bias, mask, y and ``others``."""
    data = flat(storage)
    layer = arguments(Signal, data=data), data, arguments(Weights, data=data), arguments(Bias, data=data)
    return *layer, arguments(Mask, data=flat(uint8)), data, *others


class Sizes(NamedTuple):
    """Sizes of a step by columns, and its blocks."""

    batch: int
    frames: int  # new ones
    groups: int
    slot_tiles: int
    frame_tiles: int
    readers: int  # blocks that read the same part of the state


class MmaSizes(NamedTuple):
    """Sizes of a step on tensor cores, and its blocks."""

    batch: int
    frames: int  # new ones
    groups: int
    in_per_group: int
    out_per_group: int
    slots: int  # of a block
    slot_tiles: int
    row_tiles: int  # of a group


class Block(NamedTuple):
    """First slot and channels of a block; ``first_in`` counts all groups' channels."""

    group: int
    first_slot: int
    first_in: int
    first_out: int
    outs: int  # output channels that exist
