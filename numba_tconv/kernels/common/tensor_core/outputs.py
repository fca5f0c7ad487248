"""Arguments of tensor-core stores."""

from typing import NamedTuple


class Alignment(NamedTuple):
    shift: int  # elements from a sector to y
    quantum: int  # staged outputs loaded together: 4, 2 or 1
    offset: int  # in the buffer
    whole: int  # 1 if no lane's write spans samples


class Output(NamedTuple):
    """The output (N, C_out, L_out), in memory order."""

    data: object
    bias: object
    has_bias: int
    batch: int
    columns: int  # of a sample
    first_column: int
    channels: int
    length: int
    padding: int
    alignment: Alignment


class Extent(NamedTuple):
    """Where a tile's outputs begin and end."""

    begin: int  # the tile's first own output
    next_sample: int
    next_begin: int
    lowest: int  # the sample's first output, from ``begin`` on
    highest: int  # the end of it, or of the tile
    goes_on: bool  # the next tile has the same sample
    ends: bool  # the next tile begins a sample


class Place(NamedTuple):
    """The outputs of a tile or round."""

    sample: int
    column: int
    row: int  # first row of taps
    channel: int
    channels_left: int
    extent: Extent
    head: int  # index in y of the warp's first own output


class Staging(NamedTuple):
    shared: object
    base: int  # shared address, in bytes
    at: int  # elements


class Thread(NamedTuple):
    team: int  # meets at named barrier ``team + 1``
    warp: int
    lane: int


class Runs(NamedTuple):
    """A lane's next outputs in each channel; local arrays."""

    target: object  # index in y
    source: object  # shared address of each load
    done: object  # outputs
    size: object  # outputs
