"""Which blocks of k6 compute which tiles: what it counts with is plain arithmetic, which the simulator can do."""

import numpy as np
import pytest
from numba import cuda

from numba_tconv import workloads
from numba_tconv.kernels.k6_cost import choose, grid
from numba_tconv.kernels.k6_load import make_locate

# Resident weights, resident and both warpgroups at once, streamed weights.
CONFIGS = [("kb64", "tf32"), ("kb79", "tf32x3"), ("dac_u1", "bf16")]


@pytest.mark.parametrize("which", CONFIGS, ids=" ".join)
@pytest.mark.parametrize(
    ("row_tiles", "column_tiles", "multiprocessors"), [(1, 7, 132), (3, 40, 8), (5, 1, 4), (6, 59, 132)]
)
def test_every_tile_has_one_block(which, row_tiles, column_tiles, multiprocessors):
    config = choose(workloads.get(which[0]).problem, which[1])
    blocks, band = grid(config, row_tiles, column_tiles, multiprocessors)
    assert blocks <= max(multiprocessors, row_tiles)
    turns, locate = make_locate(config)
    taken = np.zeros((row_tiles, column_tiles + config.regions), dtype=np.int64)

    @cuda.jit
    def count(taken, row_tiles, column_tiles, band):
        for turn in range(turns(row_tiles, column_tiles)):
            row_tile, column_tile = locate(turn, row_tiles, column_tiles, band)
            cuda.atomic.add(taken, (row_tile, column_tile), 1)

    count[blocks, 1](taken, row_tiles, column_tiles, band)
    expected = np.zeros_like(taken)
    expected[:, : column_tiles : config.regions] = 1  # the first tile of those that are computed together
    assert np.array_equal(taken, expected)
