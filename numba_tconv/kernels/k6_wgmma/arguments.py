"""The arguments of k6's kernel, and what its parts share. Host and device order fields alike."""

from __future__ import annotations

from typing import NamedTuple

from numba import types

from numba_tconv.kernels.common.tensor_core.outputs import Alignment, Runs
from numba_tconv.kernels.common.tensor_map import MAP_WORDS
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import flat, named

from .tile import Config


class TensorMap(NamedTuple):
    """The tensor map of x, unused where no box is fetched."""

    template: tuple  # 64-bit words, without an address
    room: int  # global memory, a map a block


class Window(NamedTuple):
    """How a stage's windows lie in shared memory (boxes.py), in bytes."""

    alike_log: int  # logarithm to base 2 of boxes.Rows.alike
    pitch: int  # between rows of a box
    shear: int  # between channels' starts in their rows
    region: int  # of a window
    slot: int  # a stage
    stages: int


class Fetch(NamedTuple):
    """How windows are fetched; each is 0 or 1."""

    boxed: int  # where one sample owns the window
    aligned: int  # windows begin at multiples of 16 bytes
    whole_tiles: int  # samples share no tile
    in_vectors: int  # rows begin and end there


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
    early: int  # elements from a multiple of 16 bytes
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
    last_taps: int  # in the last tap chunk
    channel_chunks: int  # depths of a tap chunk
    group_tiles: int  # row tiles a group
    row_tiles: int
    column_tiles: int
    band: int  # column tiles, or pairs, shared by concurrent blocks


def signature_of(config: Config) -> tuple:
    """Numba's types of the kernel's arguments, in order."""
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
    """A row tile, and the sample and column where its own outputs begin."""

    row_tile: int
    sample: int
    column: int


class Step(NamedTuple):
    """From a tile to the next."""

    samples: int
    columns: int


class Rows(NamedTuple):
    """The rows of a tile."""

    first: int  # row of taps
    channel: int  # first output channel
    channels_left: int  # existing channels of the tile


class View(NamedTuple):
    """How a lane reads its windows of a tile and tap chunk."""

    address: int  # in the first stage
    rounded: bool  # to TF32, by the copy engine
    some_outside: bool  # some lane of the warp reads outside its row
    outside: int  # the lane's columns there (operands.make_beyond), read as zeros
    together: int  # elements a load


class Lane(NamedTuple):
    """What a lane's windows share."""

    h_step: int  # bytes from h = 0 to h = 1
    odd_step: int  # bytes to the next channel
    slot: int  # bytes of a stage
    descriptor: int  # lower half, of the first weights
    # tensor_core/split_operand.py; split ahead: first the address of the warpgroup's inverse scales.
    scales: tuple


class Chunk(NamedTuple):
    """The products of a tap chunk."""

    add: int  # 0: overwrite the sums
    taps: int
    depths: int


class Turn(NamedTuple):
    """A warpgroup's turn to multiply, in ping-pong mode."""

    barrier: int
    parity: int


class Origin(NamedTuple):
    """Where a stage's window lies in x."""

    sample: int
    element: int  # of the sample's column 0
    channel: int
    channels_left: int


class Split(NamedTuple):
    """Addresses of the first stage's ``ready`` mbarrier and inverse scales."""

    ready: int
    inverses: int
    scales: tuple  # of the weights


class Sums(NamedTuple):
    """A consumer thread's sums and staging registers."""

    acc: object
    total: object  # tf32x3: sums of ``acc`` on CUDA cores
    values: object  # a slab (epilogue.slab_of)
    runs: Runs


class Leaving(NamedTuple):
    """A thread's run that waits for the copy engine (epilogue/bulk.py)."""

    held: object  # int32: bytes, shared address, stages until due (0: none waits)
    target: object  # int64: index in y
    interval: int  # stages between two runs
    y: object


class Buffers(NamedTuple):
    """A warpgroup's staging; offsets in bytes of shared memory."""

    shared: object
    as_stored: object  # shared memory as elements of x
    base: int  # its address
    at: int
    extras_at: int  # of staged biases
    turns: int  # where the warpgroups share a buffer: mbarriers, and the parity to wait for
    parity: int
