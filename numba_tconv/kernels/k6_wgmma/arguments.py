"""The kernel's arguments, and tuples that its parts share."""

from typing import NamedTuple

from numba import int32, types

from numba_tconv.kernels.common.arguments import arguments
from numba_tconv.kernels.common.tensor_core.outputs import Alignment, Runs
from numba_tconv.kernels.common.tensor_map import MAP_WORDS
from numba_tconv.ptx import device_function
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import flat

from .tile import Config


class TensorMap(NamedTuple):
    template: tuple  # 64-bit words, without an address
    room: int  # global memory, a map a block


class Window(NamedTuple):
    """A window in shared memory (boxes.py), in bytes."""

    alike_log: int  # log2 of boxes.RowAlignment.alike
    pitch: int  # between rows of a box
    shear: int  # between channels' starts in their rows
    region: int  # a window
    stage_bytes: int
    stages: int


class Fetch(NamedTuple):
    """How windows are fetched: 0 or 1 each."""

    boxed: int  # a tensor map describes x
    aligned: int  # windows are 16-byte aligned
    whole_tiles: int  # samples share no tile
    in_vectors: int  # rows begin and end at them


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
    early: int  # elements past a 16-byte boundary
    window: Window
    fetch: Fetch
    samples: Samples


class Weights(NamedTuple):
    packed: object
    bias: object  # any tensor if has_bias is 0
    has_bias: int


class Target(NamedTuple):
    """y (N, C_out, L_out), contiguous."""

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
    tap_chunks: int
    last_taps: int  # of the last tap chunk
    channel_chunks: int  # depths of a tap chunk
    group_tiles: int  # row tiles a group
    row_tiles: int
    column_tiles: int
    band: int  # column tiles (pairs) that blocks share


@device_function
def narrow_grid(grid):
    tiles = int32(grid.group_tiles), int32(grid.row_tiles), int32(grid.column_tiles), int32(grid.band)
    return Grid(grid.tap_chunks, grid.last_taps, grid.channel_chunks, *tiles)


@device_function
def narrow_input(x):
    w, f = x.window, x.fetch
    window = Window(
        int32(w.alike_log), int32(w.pitch), int32(w.shear), int32(w.region), int32(w.stage_bytes), int32(w.stages)
    )
    fetch = Fetch(f.boxed != 0, f.aligned != 0, f.whole_tiles != 0, f.in_vectors != 0)
    return Input(x.data, x.address, x.stride_n, x.stride_c, x.early, window, fetch, x.samples)


def signature_of(config: Config) -> tuple:
    stored = flat(ELEMENTS[config.tile.dtype].storage)
    of_x = dict(window=arguments(Window), fetch=arguments(Fetch), samples=arguments(Samples))
    return (
        arguments(TensorMap, template=types.UniTuple(types.int64, MAP_WORDS)),
        arguments(Input, data=stored, **of_x),
        arguments(Weights, packed=stored, bias=stored),
        arguments(Target, data=flat(ELEMENTS[config.tile.out_dtype].storage)),
        *map(arguments, (Channels, Columns, Grid, Alignment)),
    )


class Tile(NamedTuple):
    """A row tile, and where its own outputs begin."""

    row_tile: int
    sample: int
    column: int


class Step(NamedTuple):
    """The distance to the next tile."""

    samples: int
    columns: int


class Rows(NamedTuple):
    first: int  # row of taps
    channel: int
    channels_left: int


class View(NamedTuple):
    """How a lane reads its windows."""

    address: int  # in stage 0
    rounded: bool  # by the copy engine
    some_outside: bool  # for any lane of the warp
    beyond: int  # operands.make_beyond
    together: int  # elements a load


class Lane(NamedTuple):
    """What a lane's windows share."""

    h_step: int  # bytes to h = 1
    odd_step: int  # bytes to the next channel
    stage_bytes: int
    descriptor: int  # lower half, of weights
    scales: tuple  # split_operand.scales_of
    inverses: int  # split ahead: address of inverse scales


class Chunk(NamedTuple):
    add: int  # 0: overwrite the sums
    taps: int
    depths: int


class Order(NamedTuple):
    """Orders a ping-pong warpgroup's products."""

    barrier: int
    parity: int


class Origin(NamedTuple):
    """Where a window lies in x."""

    sample: int
    element: int
    channel: int
    channels_left: int


class Split(NamedTuple):
    """The first stage's ``ready`` mbarrier and inverse scales."""

    ready: int
    inverses: int
    scales: tuple  # of the weights


class Sums(NamedTuple):
    acc: object
    total: object  # tf32x3: sums of ``acc``
    values: object  # a slab
    runs: Runs


class Leaving(NamedTuple):
    """A run that waits for the copy engine (epilogue/bulk.py)."""

    held: object  # int32: bytes, shared address, passes of the mainloop until due, or 0
    target: object  # int64: index in y
    interval: int  # passes between runs
    y: object


class Shared(NamedTuple):
    words: object
    elements: object  # as elements of x
    base: int  # address


class Buffers(NamedTuple):
    """A warpgroup's staging; offsets in bytes."""

    shared: Shared
    at: int
    biases_at: int  # of staged biases
    order: int  # mbarriers of a shared buffer
    parity: int
