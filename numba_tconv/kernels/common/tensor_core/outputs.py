"""What the stores of the tensor-core rungs share by name: the output, a tile's place in it, and its staging buffer."""

from __future__ import annotations

from typing import NamedTuple


class Alignment(NamedTuple):
    """How the runs of an output lie (store_any.alignment_of)."""

    shift: int  # elements from a sector boundary to y
    quantum: int  # staged outputs that can be loaded together: 4, 2 or 1
    offset: int  # of staged outputs in their buffer, which aligns such loads
    whole: int  # 1 if samples begin and end at multiples of what a lane writes at once, else 0


class Output(NamedTuple):
    """The output (N, C_out, L_out) in memory order, and the columns of its samples."""

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
    """Where the outputs of a tile begin and end (store_any.make_aim)."""

    begin: int  # the tile's first own output
    next_sample: int  # of the next tile
    next_begin: int
    lowest: int  # range of the sample's outputs, counted from the tile's own
    highest: int
    goes_on: bool  # the next tile goes on in the sample
    ends: bool  # the next tile begins a sample


class Place(NamedTuple):
    """The outputs of a tile, or of a round of its channels."""

    sample: int  # sample and column where the tile's own outputs begin
    column: int
    row: int  # first row of taps
    channel: int  # first channel
    channels_left: int  # from the first one on
    extent: Extent
    head: int  # index in y of the tile's own first output, for the warp's first channel


class Staging(NamedTuple):
    """A staging buffer in shared memory."""

    shared: object
    base: int  # address of shared memory, in bytes
    at: int  # elements from there to the buffer


class Thread(NamedTuple):
    """Which thread of the warps that store a tile together."""

    team: int  # they meet at named barrier ``team + 1``
    warp: int  # of the team
    lane: int


class Runs(NamedTuple):
    """Four local arrays (store_runs.runs_sizes): a lane's next outputs in each of its warp's channels."""

    target: object  # index in y
    source: object  # address in shared memory, for each load
    done: object  # outputs from the run's begin
    size: object  # outputs of the run
