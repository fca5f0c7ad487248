"""What a configuration of k6 costs, by a model. The cheapest is chosen, without a search.

A block's turns follow each other; a turn is a tile, or two neighbouring ones (Config.paired). Its stages last as long
as their products and what the copy engine does for them, of which little hides behind the other. Between two tiles
the sums are stored: that is paid in full where both warpgroups store at the same time; where they take turns, one's
stores hide behind the other's products. Of all this and of memory's work one hides behind the other, but for a little.

The constants were fitted to a search over the configurations of the workloads in tf32, tf32x3 and bf16
(plots/data/search; in tf32x3 to an older one, from before its products were of fp16); a test holds what the choice
costs, against the best configuration found, to a limit.
"""

from __future__ import annotations

import math
from functools import lru_cache

from numba_tconv.formula.problem import Problem
from numba_tconv.runtime.device import H200, Device

from . import input as k6_input
from .tile import BLOCKS, CONSUMERS, MOST_STAGES, Config, channel_chunks, column_tiles, configs, sample_columns

CLOCK = 1.755e6  # clocks a millisecond
BANDWIDTH = 3.704e9  # bytes a millisecond
LOADED = 3.83e7  # bytes a millisecond, of resident weights, for which the first product waits
EXPOSED = 0.05  # of what memory or the multiprocessors do while the other takes longer: so much does not hide
BULK_TRAFFIC = 1.096  # by which stores in bulk are slower, where memory is the limit
ENDS = 667  # bytes times that of an element: so many more take as long as the ends of a run that are no sectors
# Clocks:
PRODUCT = 0.155  # a row, of one product of 64 columns
# By which those of split operands take longer: their sums are added up on CUDA cores. The search alone would have 5,
# with which head's channels are dealt out to four parts instead of two and take 1.2 times as long (a script).
SPLIT = 2.5
WINDOW_ROW, WINDOW_BYTE = 6.2, 0.03  # of the copy engine, for a window
# By which stages last longer, times how much more a stage is of the ring than of the deepest: where the warpgroups take
# the same stages, and where each has its own.
SHALLOW, SHALLOW_IN_TURN = 1.6, 2.75
ALONE = 641  # of a stage of a warpgroup that multiplies while the other stores, over its products
BULK, BULK_ROW = 50, 18.7  # the stores of a tile
BULK_BYTE = 0.0348  # a round after the first waits until the copy engine has read the one before
# A row that the warps store: by kernels/common/tensor_core/store_runs.py, with 16-bit elements, by epilogue/rows.py;
# less where they store by turns.
RUNS_ROW, HALVES, ROUNDS_ROW, IN_TURN = 81.8, 1.162, 48.7, 0.654
# Of a part of the phases: its stores, a stage beside its products, and SHALLOW; these and the next by scripts on two
# workloads.
PART, PART_ROW, PART_STAGE, PART_SHALLOW = 1500, 45, 200, 1.1
TAIL, TAIL_STAGE = 0.0075, 5.8e-5  # ms, of a launch of tail.py, and of each of its stages
TENSOR = 0.5  # of the tensor cores, for a row of one product of 64 columns: with as many taps no stage is faster


def grid_of(config: Config, row_tiles: int, column_tiles: int, multiprocessors: int) -> int:
    """Blocks: one a multiprocessor at most, if possible; with resident weights as many for each row tile."""
    groups = -(-column_tiles // config.regions)
    if config.resident:
        return row_tiles * max(1, min(multiprocessors // row_tiles, groups))
    return min(multiprocessors, groups * row_tiles)


def grid(config: Config, row_tiles: int, column_tiles: int, multiprocessors: int) -> tuple[int, int]:
    """Blocks, and the column tiles (in pairs) of a band."""
    tile, blocks = config.tile, grid_of(config, row_tiles, column_tiles, multiprocessors)
    if config.resident:
        return blocks, 1
    # As many bytes of x as of weights for the blocks that run together.
    band = round(math.sqrt(multiprocessors * tile.rows * tile.tap_chunk / (CONSUMERS * tile.advance)))
    return blocks, max(1, min(band, -(-column_tiles // config.regions)))


def turns_of(config: Config, row_tiles: int, column_tiles: int, multiprocessors: int) -> int:
    """Turns of the multiprocessor that has the most."""
    blocks = grid_of(config, row_tiles, column_tiles, multiprocessors)
    waves = -(-blocks // multiprocessors)  # more than one where there are more tiles of rows than multiprocessors
    return waves * -(-(-(-column_tiles // config.regions) * row_tiles) // blocks)


def stores_of(config: Config) -> float:
    """Clocks that a warpgroup takes to store a tile."""
    tile = config.tile
    if tile.part:
        return PART + PART_ROW * tile.rows
    if not config.bulk_channels:
        row = ROUNDS_ROW if config.by_rows else RUNS_ROW * (HALVES if tile.out_dtype.itemsize == 2 else 1)
        return tile.rows * row * (1 if config.paired else IN_TURN)
    written = tile.rows * ((tile.span + 1) / 2 if tile.empty_slots else 1)  # what no row reaches is only stored
    waits = (tile.channels // config.bulk_channels - 1) * BULK_BYTE * config.buffer_bytes * config.regions
    return BULK + BULK_ROW * written + waits


def cost(problem: Problem, config: Config, device: Device) -> float:
    """Milliseconds, but for what every launch costs."""
    p, tile = problem, config.tile
    stages = tile.tap_chunks(p) * channel_chunks(p, config)
    row_products = tile.tap_chunk * (1 if tile.parts == 1 else 3) * BLOCKS * tile.rows
    products, busy, more = row_products * PRODUCT * (SPLIT if tile.parts == 2 else 1), 0, 0
    if tile.part:
        busy, more = row_products * TENSOR, PART_STAGE
    window = tile.depth * (WINDOW_ROW + config.width * tile.itemsize * WINDOW_BYTE)
    copies, stores = config.regions * window, stores_of(config)
    shallow = 1 / (config.depths * config.stages) - 1 / MOST_STAGES
    if config.paired:
        stage = max(2 * products + copies, 2 * busy) + more
        turn = stages * stage * (1 + (PART_SHALLOW if tile.part else SHALLOW) * shallow) + stores
    else:
        stage = max(products + copies, busy) + more / 2
        turn = max(stages * stage, (stages * max(products + ALONE, copies) + stores) / 2)
        turn *= 1 + SHALLOW_IN_TURN * shallow
    row_tiles = tile.row_tiles(p) * p.groups
    clocks = turn * turns_of(config, row_tiles, column_tiles(p, config), device.multiprocessors)
    ends = 0 if tile.aligned else p.out_channels * column_tiles(p, config) * ENDS / tile.itemsize
    memory = (p.min_bytes(tile.itemsize) + ends) / BANDWIDTH * (BULK_TRAFFIC if config.bulk_channels else 1)
    shape, groups = (p.batch, p.in_channels, p.length), p.groups // config.splits
    before = k6_input.cost(shape, config, groups, sample_columns(p, config))
    if config.tail:
        before += TAIL + TAIL_STAGE * stages
    computed = config.weights / LOADED + clocks / CLOCK
    return before + max(computed, memory) + EXPOSED * min(computed, memory)


@lru_cache(maxsize=1024)
def choose(problem: Problem, precision: str) -> Config | None:
    """The configuration of a problem; None if it has none."""
    return min(configs(problem, precision), key=lambda config: cost(problem, config, H200), default=None)
