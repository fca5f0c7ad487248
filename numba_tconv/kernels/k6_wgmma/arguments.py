"""The arguments of k6's kernel, and what its parts share, by name.

Host and device order the fields alike. The kernel narrows counts to 32 bits where that suffices.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import types

from numba_tconv.kernels.common.tensor_core.outputs import Alignment, Runs
from numba_tconv.kernels.common.tensor_map import MAP_WORDS
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import flat, named

from .tile import Config


class TensorMap(NamedTuple):
    """The tensor map of x. It is unused where no box is fetched."""

    template: tuple  # its words, without an address
    room: int  # global memory for a map a block


class Window(NamedTuple):
    """How the windows of a stage lie in shared memory (boxes.py), in bytes but for the first and the last."""

    alike_log: int  # rows as many apart begin alike modulo 16 bytes: logarithm to base 2
    pitch: int  # from a row of a box to the next
    shear: int  # from a channel's start in its row to the next channel's
    region: int  # of a window
    slot: int  # from a stage to the next
    stages: int


class Fetch(NamedTuple):
    """How windows are fetched; each is 0 or 1."""

    boxed: int  # in boxes where one sample owns the window
    aligned: int  # all windows begin at multiples of 16 bytes
    whole_tiles: int  # samples share no tile
    in_vectors: int  # rows begin and end at multiples of 16 bytes


class Samples(NamedTuple):
    """The samples of x as columns."""

    batch: int
    length: int
    columns: int  # of a sample
    first_column: int


class Input(NamedTuple):
    """x (N, C_in, L), contiguous along positions."""

    data: object
    address: int
    stride_n: int  # strides in elements
    stride_c: int
    early: int  # elements from a multiple of 16 bytes to x
    window: Window
    fetch: Fetch
    samples: Samples


class Weights(NamedTuple):
    packed: object
    bias: object  # any tensor if has_bias is 0
    has_bias: int


class Target(NamedTuple):
    """y (N, C_out, L_out), in memory order."""

    data: object
    batch: int
    length: int


class Channels(NamedTuple):
    in_per_group: int
    out_per_group: int
    groups: int


class Columns(NamedTuple):
    """The samples of y as columns."""

    padding: int
    per_sample: int
    first: int


class Grid(NamedTuple):
    """The tiles, and the loops of one."""

    tap_chunks: int
    last_taps: int  # of the last tap chunk
    channel_chunks: int  # depths of a tap chunk
    group_tiles: int  # row tiles of a group
    row_tiles: int
    column_tiles: int
    band: int  # column tiles, or pairs, that concurrent blocks share


def signature_of(config: Config) -> tuple:
    """Return Numba's types of the kernel's arguments: TensorMap, Input, Weights, Target, Channels, Columns, Grid,
    Alignment.
    """
    tile, integer = config.tile, types.int64
    stored = flat(ELEMENTS[tile.dtype].storage)

    def kind(fields, **others):
        return named(fields, **dict.fromkeys(fields._fields, integer) | others)

    return (
        kind(TensorMap, template=types.UniTuple(integer, MAP_WORDS)),
        kind(Input, data=stored, window=kind(Window), fetch=kind(Fetch), samples=kind(Samples)),
        kind(Weights, packed=stored, bias=stored),
        kind(Target, data=flat(ELEMENTS[tile.out_dtype].storage)),
        *map(kind, (Channels, Columns, Grid, Alignment)),
    )


class Tile(NamedTuple):
    """A tile, by its row tile, and the sample and column where its own outputs begin."""

    row_tile: int
    sample: int
    column: int


class Step(NamedTuple):
    """The way from a tile to the next."""

    samples: int
    columns: int


class Rows(NamedTuple):
    """The rows of a tile."""

    first: int  # row of taps
    channel: int  # first output channel
    channels_left: int  # existing channels of the tile


class View(NamedTuple):
    """How a lane reads its windows of a tile and tap chunk (operands.py)."""

    address: int  # of the window in the first stage
    rounded: bool  # the copy engine has rounded it to TF32
    some_outside: bool  # whether a lane of the warp reads outside its row
    outside: int  # the lane's columns there (operands.make_beyond), which become zeros
    together: int  # elements a load


class Lane(NamedTuple):
    """What all of a lane's windows share."""

    h_step: int  # bytes from the row of h = 0 to that of h = 1
    odd_step: int  # bytes to the next channel
    slot: int  # bytes of a stage
    descriptor: int  # lower half: of the first stage's or depth's weights
    # Of split operands (kernels/common/tensor_core/split_operand.py); split ahead, first the address of the inverse
    # scales of the warpgroup's windows.
    scales: tuple


class Chunk(NamedTuple):
    """The products of a tap chunk."""

    add: int  # 0 if the first ones overwrite the sums
    taps: int
    depths: int


class Turn(NamedTuple):
    """A warpgroup's turn to multiply, in ping-pong mode."""

    barrier: int
    parity: int


class Origin(NamedTuple):
    """Where the window of a stage lies in x."""

    sample: int
    element: int  # of the sample, in column 0
    channel: int
    channels_left: int


class Split(NamedTuple):
    """What producers need to split operands: addresses of the first stage's ``ready`` mbarrier and inverse scales."""

    ready: int
    inverses: int
    scales: tuple  # of the weights


class Sums(NamedTuple):
    """A consumer thread's sums, and the registers in which they leave."""

    acc: object
    total: object  # in tf32x3: sums of ``acc`` on CUDA cores
    values: object  # a slab of the sums (epilogue.slab_of)
    runs: Runs


class Leaving(NamedTuple):
    """A thread's run that waits to be handed to the copy engine (epilogue/bulk.py)."""

    held: object  # int32: bytes, address in shared memory, stages until it is due (0: none waits)
    target: object  # int64: index in y
    interval: int  # stages between the departures of two runs
    y: object


class Buffers(NamedTuple):
    """The warpgroup's staging in shared memory; offsets are in bytes."""

    shared: object
    as_stored: object  # shared memory as elements of x
    base: int  # its address
    at: int
    extras_at: int  # of staged biases
    turns: int  # mbarriers of the warpgroups' turns, where both have one buffer, and the parity to wait for
    parity: int
