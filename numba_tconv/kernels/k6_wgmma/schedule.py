"""Tile scheduler: concurrent blocks share inputs and weights in L2."""

from collections.abc import Callable
from typing import NamedTuple

from numba import cuda, int32, int64, uint32

from numba_tconv.ptx import device_function

from .arguments import Step, Tile
from .tile import Config


class Schedule(NamedTuple):
    """For producers and consumers."""

    turns: Callable  # of a block
    locate: Callable  # a turn's row tile and first column tile
    sample_of: Callable  # and the column, of a column tile
    walk: Callable  # by a step, undivided


def make_schedule(config: Config) -> Schedule:
    resident, together, advance = config.resident, config.regions, config.tile.advance

    @device_function
    def quotient(a, b):
        return int32(uint32(a) // uint32(b))

    @device_function
    def turns(grid):
        block, blocks = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        pairs = quotient(grid.column_tiles + together - 1, together)
        if resident:
            return quotient(pairs - quotient(block, grid.row_tiles) - 1, quotient(blocks, grid.row_tiles)) + 1
        return quotient(pairs * grid.row_tiles - block - 1, blocks) + 1

    @device_function
    def locate(turn, grid):
        row_tiles, band = grid.row_tiles, grid.band
        block, blocks = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        if resident:
            rank = quotient(block, row_tiles)
            return int32(block - rank * row_tiles), int32((rank + turn * quotient(blocks, row_tiles)) * together)
        pairs = quotient(grid.column_tiles + together - 1, together)
        rank = int32(block + turn * blocks)
        first = quotient(rank, band * row_tiles)
        rest, here = int32(rank - first * (band * row_tiles)), int32(min(band, pairs - first * band))
        row_tile = quotient(rest, here)
        return row_tile, int32((first * band + rest - row_tile * here) * together)

    @device_function
    def sample_of(column_tile, columns):
        n, j = divmod(int64(column_tile) * advance, columns)
        return int32(n), j

    @device_function
    def walk(n, j, n_step, j_step, columns):
        n, j = int32(n + n_step), j + j_step
        return (int32(n + 1), j - columns) if j >= columns else (n, j)

    return Schedule(turns, locate, sample_of, walk)


def make_follow(config: Config, schedule: Schedule, turns_on: int):
    """Build ``first_tile``, with the step to the next, and ``tile_after``; ``own``: the warpgroup's tile in a pair."""
    resident, locate, sample_of, walk = config.resident, schedule.locate, schedule.sample_of, schedule.walk

    @device_function
    def first_tile(turn, grid, own, columns):
        row_tile, column_tile = locate(turn, grid)
        n, j = sample_of(column_tile + own, columns)
        if not resident:
            return Tile(row_tile, n, j), Step(int32(0), int64(0))
        _, next_tile = locate(int32(turn + turns_on), grid)
        samples, further = sample_of(next_tile - column_tile, columns)
        return Tile(row_tile, n, j), Step(samples, further)

    @device_function
    def tile_after(turn, tile, step, grid, own, columns):
        if resident:
            n, j = walk(tile.sample, tile.column, step.samples, step.columns, columns)
            return Tile(tile.row_tile, n, j)
        row_tile, column_tile = locate(turn, grid)
        n, j = sample_of(column_tile + own, columns)
        return Tile(row_tile, n, j)

    return first_tile, tile_after
