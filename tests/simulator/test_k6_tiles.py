"""Which blocks of k6 compute which tiles: plain arithmetic."""

import numpy as np
import pytest
from numba import cuda

from numba_tconv.kernels.k6_wgmma.arguments import Grid
from numba_tconv.kernels.k6_wgmma.choose import blocks_and_band, choose_whole
from numba_tconv.kernels.k6_wgmma.schedule import make_follow, make_schedule
from numba_tconv.kernels.k6_wgmma.tile import CONSUMERS
from numba_tconv.lab.measure import workloads

# Resident weights, resident and both warpgroups at once, streamed weights.
CONFIGS = [("kb64", "tf32"), ("kb79", "tf32x3"), ("dac_u1", "bf16")]


configs = pytest.mark.parametrize("which", CONFIGS, ids=" ".join)
tiles = pytest.mark.parametrize(
    ("row_tiles", "column_tiles", "multiprocessors"), [(1, 7, 132), (3, 40, 8), (5, 1, 4), (6, 59, 132)]
)


@configs
@tiles
def test_every_tile_has_one_block(which, row_tiles, column_tiles, multiprocessors):
    config = choose_whole(workloads.get(which[0]).problem, which[1])
    blocks, band = blocks_and_band(config, row_tiles, column_tiles, multiprocessors)
    assert blocks <= max(multiprocessors, row_tiles)
    turns, locate, *_ = make_schedule(config)
    taken = np.zeros((row_tiles, column_tiles + config.regions), dtype=np.int64)

    @cuda.jit
    def count(taken, row_tiles, column_tiles, band):
        tiles = Grid(0, 0, 0, 0, row_tiles, column_tiles, band)
        for turn in range(turns(tiles)):
            row_tile, column_tile = locate(turn, tiles)
            cuda.atomic.add(taken, (row_tile, column_tile), 1)

    count[blocks, 1](taken, row_tiles, column_tiles, band)
    expected = np.zeros_like(taken)
    expected[:, : column_tiles : config.regions] = 1  # the first tile of those that are computed together
    assert np.array_equal(taken, expected)


@configs
@tiles
@pytest.mark.parametrize("columns", [24, 1000])  # of a sample: less than a tile, and some tiles
def test_a_warpgroup_goes_from_each_of_its_tiles_to_the_next(which, row_tiles, column_tiles, multiprocessors, columns):
    config = choose_whole(workloads.get(which[0]).problem, which[1])
    blocks, band = blocks_and_band(config, row_tiles, column_tiles, multiprocessors)
    paired, advance = config.paired, config.tile.advance
    turns_on = 1 if paired else CONSUMERS
    schedule = make_schedule(config)
    turns, (first_tile, tile_after) = schedule.turns, make_follow(config, schedule, turns_on)
    taken = np.zeros((row_tiles, column_tiles + CONSUMERS), dtype=np.int64)

    @cuda.jit
    def follow(taken, row_tiles, column_tiles, band):
        crew = cuda.threadIdx.x
        tiles, own = Grid(0, 0, 0, 0, row_tiles, column_tiles, band), crew if paired else 0
        turn, count = 0 if paired else crew, turns(tiles)
        tile, step = first_tile(turn, tiles, own, columns)
        while turn < count:
            column_tile, beside = divmod(tile.sample * columns + tile.column, advance)
            right = beside == 0 and 0 <= tile.column < columns
            cuda.atomic.add(taken, (tile.row_tile, column_tile), 1 if right else 1000)
            turn += turns_on
            if turn < count:
                tile = tile_after(turn, tile, step, tiles, own, columns)

    follow[blocks, CONSUMERS](taken, row_tiles, column_tiles, band)
    expected = np.zeros_like(taken)
    expected[:, : -(-column_tiles // config.regions) * config.regions] = 1
    assert np.array_equal(taken, expected)
