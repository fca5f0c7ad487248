"""The producer: one warp fills the ring by TMA boxes.

Where every ``sheared``-th row begins alike modulo 16 bytes, one sheared map (k6_wgmma/boxes.py) suffices. Its boxes are
wider, so a copy with aligned rows may be quicker."""

from functools import lru_cache

from numba import cuda, int32, int64

from numba_tconv.kernels.common.pipeline import BARRIER, EMPTY
from numba_tconv.kernels.common.tensor_map import ALIGNMENT, MAP_BYTES, encode, publish, row_bytes, rows_alike
from numba_tconv.ptx import (
    cp_async_bulk_tensor,
    cp_async_bulk_tensor_4d,
    device_function,
    mbarrier_arrive_expect_tx,
    mbarrier_wait,
    tensormap_acquire,
)
from numba_tconv.runtime.layout import Layout

from .operands import make_advance, make_start
from .tile import Config


def sheared_of(g: Layout) -> int:
    """Distance of rows that begin alike modulo 16 bytes; 1 if a plain map suffices; 0 if grad_output must be copied."""
    alike = 0 if g.offset % ALIGNMENT else rows_alike(g.shape, g.strides, g.dtype.itemsize)
    overlapping = alike > 1 and g.strides[1] < ALIGNMENT // g.dtype.itemsize
    return 0 if overlapping or (alike and g.shape[1] % alike) else alike


def shear_of(strides: tuple, config: Config) -> int:
    return strides[1] % (ALIGNMENT // config.itemsize) if config.sheared > 1 else 0


@lru_cache(maxsize=1024)
def template(shape: tuple, strides: tuple, config: Config) -> tuple[int, ...]:
    """The sheared map of grad_output (N, C_out, L_out), ``strides`` in elements, at any address."""
    (batch, channels, length), itemsize, sheared = shape, config.itemsize, config.sheared
    n_bytes, c_bytes = row_bytes(shape, strides, itemsize)
    shear = shear_of(strides, config)
    return encode(
        config.precision,
        (length + (sheared - 1) * shear, sheared, channels // sheared, batch),
        (c_bytes - shear * itemsize, c_bytes * sheared, n_bytes),
        (config.width, sheared, config.g_channels // sheared, 1),
    )


def make_produce(config: Config, tile_of):
    slot_bytes, w_bytes, spacing, stage_bytes = config.slot, config.b_bytes, config.spacing, config.stage_bytes
    boxes, piece, stride, channels, entries = config.boxes, config.piece, config.stride, config.channels, config.entries
    sheared, split_k, vector, map_room = config.sheared, config.split_k, 16 // config.itemsize, config.map
    stages = config.stages
    start, advance_rows = make_start(config), make_advance(config)

    @device_function
    def produce(maps, shape, grid, splits, number, pipe, thread):
        g_map = maps.workspace + int64(cuda.blockIdx.x) * (2 * MAP_BYTES)
        publish(maps.g_template, maps.g_address, g_map, thread.base + map_room, thread.lane)
        publish(maps.b_template, maps.b_address, g_map + MAP_BYTES, thread.base + map_room, thread.lane)
        if thread.lane == 0:
            tensormap_acquire(g_map)
            tensormap_acquire(g_map + MAP_BYTES)
            stage, parity, tile_stages = int32(0), int32(EMPTY), int32(grid.tile_stages)
            while number < grid.tiles:
                tile = tile_of(number, grid, shape.groups, splits)
                g_row, phase, w_entry = int32(tile.group * shape.group_rows), int32(0), int32(0)
                if split_k:
                    rows_before, phase = start(int32(tile.split * tile_stages))
                    g_row, w_entry = int32(g_row + rows_before), int32(tile.split * tile_stages * entries)
                w_row = int32(tile.group * shape.group_channels + tile.channel_tile * channels)
                column, stages_left = int32((tile.position * stride + shape.first) & -vector), tile_stages
                while stages_left > 0:
                    mbarrier_wait(pipe.empty + BARRIER * stage, parity)
                    full = pipe.full + BARRIER * stage
                    mbarrier_arrive_expect_tx(full, stage_bytes)
                    target = int32(thread.base + stage * slot_bytes)
                    cp_async_bulk_tensor(target, g_map + MAP_BYTES, w_entry, w_row, int32(0), full)
                    for box in range(boxes):
                        box_target = int32(target + w_bytes + box * spacing)
                        begin = int32(column + box * (piece * stride))
                        if sheared > 1:
                            cp_async_bulk_tensor_4d(box_target, g_map, begin, int32(0), g_row, tile.sample, full)
                        else:
                            cp_async_bulk_tensor(box_target, g_map, begin, g_row, tile.sample, full)
                    w_entry = int32(w_entry + entries)
                    g_row, phase = advance_rows(g_row, phase)
                    stages_left, stage = int32(stages_left - 1), int32(stage + 1)
                    if stage == stages:
                        stage, parity = int32(0), int32(parity ^ 1)
                number = int32(number + int32(cuda.gridDim.x))

    return produce
