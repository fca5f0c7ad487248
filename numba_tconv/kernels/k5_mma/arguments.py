"""Arguments, and where a thread works."""

from typing import NamedTuple

from numba import cuda, float32, int32, types, uint32

from numba_tconv.kernels.common.arguments import arguments
from numba_tconv.kernels.common.tensor_core.outputs import Alignment
from numba_tconv.ptx import device_function
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import flat

from .tile import COLUMN_WARPS, WARP_COLUMNS, Config


class Input(NamedTuple):
    data: object
    stride_n: int  # strides in elements
    stride_c: int


class Weights(NamedTuple):
    packed: object
    bias: object  # any tensor if has_bias is 0
    has_bias: int


class Sizes(NamedTuple):
    batch: int
    length: int
    out_length: int
    in_per_group: int
    out_per_group: int
    groups: int
    padding: int
    columns: int  # of a sample
    first_column: int  # position 0 or before


class Loop(NamedTuple):
    tap_chunks: int
    stages_a_chunk: int
    group_tiles: int


class Thread(NamedTuple):
    """A thread in its block; a *team* is the warps of a tile."""

    lane: int
    team: int
    warp: int
    warp_row: int
    first_column: int  # of the warp, in the tile


class RowTile(NamedTuple):
    group: int
    first_row: int  # row of taps
    first_channel: int  # of all groups
    channels_left: int


def make_thread_of(config: Config):
    tile_warps = config.tile_warps

    @device_function
    def thread_of(number):
        lane, warp = int32(number & 31), int32(cuda.shfl_sync(0xFFFFFFFF, number >> 5, 0))
        team, team_warp = int32(uint32(warp) // uint32(tile_warps)), int32(uint32(warp) % uint32(tile_warps))
        return Thread(lane, team, team_warp, int32(team_warp // COLUMN_WARPS), int32((team_warp & 1) * WARP_COLUMNS))

    return thread_of


def types_of(config: Config) -> tuple:
    stored, bits = flat(ELEMENTS[config.tile.dtype].storage), flat(bits_type(config))
    weights = arguments(Weights, packed=bits, bias=stored)
    return arguments(Input, data=bits), weights, stored, *map(arguments, (Sizes, Loop, Alignment))


def bits_type(config: Config) -> types.Type:
    """The type that copies elements as bits."""
    return float32 if config.tile.itemsize == 4 else types.uint16
