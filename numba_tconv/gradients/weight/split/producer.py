"""Loads, by cp.async."""

from collections.abc import Callable
from typing import NamedTuple

from numba import int64

from numba_tconv.gradients.window import NOWHERE, Columns, locate, make_fetch, make_locate
from numba_tconv.ptx import device_function

from .tile import Config


class Position(NamedTuple):
    sample: int
    position: int


def make_load(config: Config) -> Callable:
    """Build the load of a stage, from element ``slot`` on: x, then grad_output."""
    x_stage = config.x_stage

    @device_function
    def locate_input(columns, column, a):
        n, i = locate(columns.sample, columns.position, column, columns.sample_columns)
        inside = n < columns.sizes.batch and i < columns.sizes.length
        return n * columns.signal.stride_n + i * columns.signal.stride_l if inside else int64(NOWHERE)

    fetch_x = make_fetch(config.x_window, locate_input)
    fetch_g = make_fetch(config.window, make_locate(config.stride, config.dilation))

    @device_function
    def load(shared, slot, column, tile, grad_output, x, sizes, grid):
        columns = Columns(column.sample, column.position, grid.columns, 0, 1, x, sizes)
        fetch_x(shared, slot, x.data, tile.x_source, x.stride_c, tile.rows_left, columns)
        phases_left = grid.phases - tile.first_phase
        columns = Columns(column.sample, column.position, grid.columns, tile.first_tap, phases_left, grad_output, sizes)
        fetch_g(shared, slot + x_stage, grad_output.data, tile.g_source, grad_output.stride_c, tile.channels_left,
                columns)  # fmt: skip

    return load
