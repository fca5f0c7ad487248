"""Which weights a block packs for tensor cores, and their places within a tap."""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int32, int64, uint32, uint64

from numba_tconv.kernels.common.integer import divided
from numba_tconv.kernels.common.weight_box import Box
from numba_tconv.ptx import device_function
from numba_tconv.runtime.elements import ELEMENTS

from .fragments import mma_a, split_channel, wgmma_b_at
from .tile import Tile

MAPS = wgmma_b_at, mma_a, split_channel
ON_GPU = tuple(map(device_function, MAPS))


def make_place(tile: Tile, order: str, maps: tuple = MAPS) -> Callable:
    """A function that returns the row and the channel of element ``e`` of a tap."""
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


def box_of(tile: Tile) -> Box:
    """The box of a stage's weights."""
    return Box(tile.dtype, tile.depth, tile.channels, tile.tap_chunk, tile.phases, tile.taps.rows)


def make_stage(tile: Tile) -> Callable:
    """A device function: the stage that a block packs; its first (input channel, output channel, tap); its first row of
    taps; input and output channels from the first on.
    """
    depth, channels, phases, row_parts = tile.depth, tile.channels, tile.phases, tile.row_parts
    chunk_taps = tile.tap_chunk * tile.taps.rows

    @device_function
    def stage_of(row_tiles, tap_chunks, channel_chunks, in_per_group, out_channels):
        number = int32(cuda.blockIdx.x)
        rest, channel_chunk = divided(number, int32(channel_chunks))
        rest, tap_chunk = divided(rest, int32(tap_chunks))
        group, row_tile = divided(rest, int32(row_tiles))
        co, row = int32(row_tile // row_parts * channels), int32(row_tile % row_parts * phases)
        first = group * in_per_group + channel_chunk * depth, co, row + tap_chunk * int64(chunk_taps)
        left = int32(in_per_group - channel_chunk * depth), int32(out_channels - co)
        return number, first, row, left

    return stage_of


def make_gather(tile: Tile, order: str, at_weight: Callable, within: Callable) -> Callable:
    """A device function: 16 bytes of a tap from the box in shared memory, with zeros for missing weights."""
    elements, phases, channels, reciprocal = 16 // tile.operand_size, tile.phases, tile.channels, tile.reciprocal
    widened, all_weights = ELEMENTS[tile.dtype].load, tile.channels * tile.phases == tile.rows
    # Distances of rows and channels from the first element's are the same for all vectors.
    rows_on, channels_on = zip(*map(make_place(tile, order), range(elements)), strict=True)
    place = device_function(make_place(tile, order, ON_GPU))

    @device_function
    def gather(values, shared, lies, limits, tap, vector):
        first_m, first_k = place(uint32(vector * elements))
        if all_weights and limits[4]:
            for u in range(elements):
                m, k = int32(first_m + rows_on[u]), int32(first_k + channels_on[u])
                channel = int32(int32(m * reciprocal) >> 16)
                values[u] = widened(shared[uint64(at_weight(lies, k, channel, tap, int32(m - channel * phases)))])
        else:
            for u in range(elements):
                m, k = int32(first_m + rows_on[u]), int32(first_k + channels_on[u])
                channel = int32(int32(m * reciprocal) >> 16)
                a = int32(m - channel * phases)
                there = m < channels * phases and within(limits, k, channel, tap, a)
                value = widened(shared[uint64(at_weight(lies, k, channel, tap, a) if there else int32(0))])
                values[u] = value if there else float32(0)

    return gather
