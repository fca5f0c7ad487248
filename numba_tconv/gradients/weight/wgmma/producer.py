"""The producer: one warp fills the ring by TMA boxes.

Rows of grad_output that begin alike modulo 16 bytes share a map; boxes are 16-byte aligned."""

from typing import NamedTuple

from numba import int32, int64

from numba_tconv.kernels.common.pipeline import BARRIER
from numba_tconv.kernels.common.tensor_map import MAP_BYTES, make_publish, publish
from numba_tconv.ptx import cp_async_bulk_tensor, device_function, mbarrier_arrive_expect_tx, st_shared_b64

from .tile import Config


def make_first_pair(config: Config):
    """Build (tile along pairs) -> its boxes' first output channel, of the first set, and its first pair from there."""
    by_taps, g_channels, pairs = config.by_taps, config.g_channels, config.pairs
    phases, alike = config.window.phases, config.alike

    @device_function
    def first_pair(pair_tile):
        if not by_taps:
            return int32(pair_tile * g_channels), int32(0)
        first = int32(pair_tile * pairs)
        channel = int32(first // (phases * alike) * alike)
        return channel, int32(first - channel * phases)

    return first_pair


class Source(NamedTuple):
    g_maps: int  # by set of rows
    x_map: int
    g_row: int  # in each map
    x_row: int
    first_element: int  # of a row, which the chunk's first tap meets at position 0
    stride_c: int


def make_producer(config: Config):
    """Build ``publish_maps``, for all lanes, and ``copy``, for one."""
    slot_bytes, x_bytes, spacing, stage_bytes = config.slot, config.b_bytes, config.spacing, config.stage_bytes
    alike, pieces, piece_positions = config.alike, config.pieces, config.positions // config.pieces
    stride, vector, clears = config.window.stride, 16 // config.itemsize, config.clears > 0
    flags, map_room = config.words, config.map
    publish_sets, acquire_sets = make_publish(config.itemsize)

    @device_function
    def publish_maps(maps, rows, g_maps, x_map, thread):
        publish_sets(maps.g_template, g_maps, thread.base + map_room, alike, maps.g_address, 0, rows.stride_c,
                     rows.length, rows.channels, thread.lane)  # fmt: skip
        publish(maps.b_template, maps.b_address, x_map, thread.base + map_room, thread.lane)
        acquire_sets(g_maps, alike + 1, thread.lane)

    @device_function
    def copy(source, sample, position, pipe, stage, base):
        full = pipe.full + BARRIER * stage
        if clears:
            st_shared_b64(base + flags + 8 * stage, int64(position == 0))
        mbarrier_arrive_expect_tx(full, stage_bytes)
        target = int32(base + stage * slot_bytes)
        cp_async_bulk_tensor(target, source.x_map, position, source.x_row, sample, full)
        for box in range(alike * pieces):
            before = (box // pieces * int32(source.stride_c)) & (vector - 1)  # map elements before its row
            column = int32((position + box % pieces * piece_positions) * stride
                           + ((source.first_element + before) & -vector))  # fmt: skip
            g_map = source.g_maps + box // pieces * MAP_BYTES
            cp_async_bulk_tensor(int32(target + x_bytes + box * spacing), g_map, column, source.g_row, sample, full)

    return publish_maps, copy
