"""Which weights a block packs, and where a tap's weights stand: what the kernels that pack share."""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, int32, int64

from ..ptx import device_function
from .divided import divided
from .fragments import mma_a, split_channel, wgmma_b_at
from .tensor_tile import Tile

MAPS = wgmma_b_at, mma_a, split_channel
ON_GPU = tuple(map(device_function, MAPS))


def make_place(tile: Tile, order: str, maps: tuple = MAPS) -> Callable:
    """A function that tells the row and the channel of the element ``e`` of a tap."""
    rows, elements, halves = tile.rows, 16 // tile.operand_size, 4 // tile.operand_size
    of_wgmma, of_mma, of_split = maps

    def wgmma_place(e):
        return of_wgmma(e, rows, elements)

    def mma_place(e):
        rest, h = divmod(e, halves)
        rest, i = divmod(rest, 4)
        tile16, lane = divmod(rest, 32)
        row, k = of_mma(lane, i, h, halves)
        return tile16 * 16 + row, k

    place = {"wgmma": wgmma_place, "mma": mma_place}[order]
    if tile.parts == 1:
        return place
    inner = place if maps is MAPS else device_function(place)

    def split_place(e):
        row, k = inner(e)
        return row, of_split(k)

    return split_place


def make_stage(tile: Tile) -> Callable:
    """A device function: a block packs a stage; its first output channel, row of taps, tap and input channel, and how
    many input channels there are from that one on. Worked out once for all of the stage's elements."""
    depth, channels, phases, row_parts = tile.depth, tile.channels, tile.phases, tile.row_parts
    chunk_taps = tile.tap_chunk * tile.taps.rows

    @device_function
    def stage_of(row_tiles, tap_chunks, channel_chunks, in_per_group):
        rest, channel_chunk = divided(int32(cuda.blockIdx.x), int32(channel_chunks))
        rest, tap_chunk = divided(rest, int32(tap_chunks))
        group, row_tile = divided(rest, int32(row_tiles))
        first_co, first_a = int32(row_tile // row_parts * channels), int32(row_tile % row_parts * phases)
        first_t, first_c = tap_chunk * int64(chunk_taps), group * in_per_group + channel_chunk * depth
        return first_co, first_a, first_t, first_c, int32(in_per_group - channel_chunk * depth)

    return stage_of
