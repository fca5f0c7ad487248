"""The choice of k6's configuration: a cost model of the candidates, without a search.

A turn computes one tile, or a pair (Config.paired). A stage lasts as long as its products plus the copy engine's work.
The epilogue adds its full time if both warpgroups store together; else it hides behind the other's products. Memory
traffic overlaps with all of it, but for a share EXPOSED.

Few tiles with long sums may split them over input channels (split-K, kernels/common/split_sums.py), which costs a
second stage.

The constants are fitted to measurements in tf32, tf32x3 and bf16; a test limits what a choice costs against the best
configuration.
"""

from __future__ import annotations

import math
from functools import lru_cache

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.split_sums import LEAST_GAIN, second_stage_ms, split, worthwhile
from numba_tconv.runtime.device import H200, Device

from . import input as k6_input
from .tile import BLOCKS, CONSUMERS, MOST_STAGES, Config, channel_chunks, column_tiles, configs, sample_columns

CLOCK = 1.755e6  # clocks a millisecond
BANDWIDTH = 3.704e9  # bytes a millisecond
LOADED = 3.83e7  # bytes a millisecond of resident weights, before the first product
EXPOSED = 0.05  # share of the shorter of memory's and the multiprocessors' time that does not hide
BULK_TRAFFIC = 1.096  # factor of memory time with bulk stores
ENDS = 667  # bytes of traffic for a run's unaligned ends, times an element's bytes
# Clocks, and factors:
PRODUCT = 0.155  # a row of one product of 64 columns
SPLIT = 2.5  # factor of split products, whose sums are added up on CUDA cores
WINDOW_ROW, WINDOW_BYTE = 6.2, 0.03  # the copy engine's, a row and a byte of a window
# A stage's slowdown per share of the ring beyond that in the deepest ring: paired, and in turn.
SHALLOW, SHALLOW_IN_TURN = 1.6, 2.75
ALONE = 641  # a stage beside its products, while the other warpgroup stores
BULK, BULK_ROW = 50, 18.7  # bulk stores: a tile, a row
BULK_BYTE = 0.0348  # a byte of a round that must leave before the next
# Warps' stores, a row: by store_runs.py; its factor for 16-bit elements; by epilogue/rows.py; the factor by turns.
RUNS_ROW, HALVES, ROUNDS_ROW, IN_TURN = 81.8, 1.162, 48.7, 0.654
# A part of the phases: a tile's and a row's stores, a stage beside its products, SHALLOW.
PART, PART_ROW, PART_STAGE, PART_SHALLOW = 1500, 45, 200, 1.1
TAIL, TAIL_STAGE = 0.0075, 5.8e-5  # ms: a launch of tail.py, and each of its stages
TENSOR = 0.5  # the least for a row of one product of 64 columns, of a part of the phases


def grid_of(config: Config, row_tiles: int, column_tiles: int, multiprocessors: int) -> int:
    """Return the blocks: at most one a multiprocessor if possible; with resident weights as many for each row tile."""
    groups = -(-column_tiles // config.regions)
    if config.resident:
        return row_tiles * max(1, min(multiprocessors // row_tiles, groups))
    return min(multiprocessors, groups * row_tiles)


def grid(config: Config, row_tiles: int, column_tiles: int, multiprocessors: int) -> tuple[int, int]:
    """Return the blocks, and the band of column tiles (or pairs) that concurrent blocks share."""
    tile, blocks = config.tile, grid_of(config, row_tiles, column_tiles, multiprocessors)
    if config.resident:
        return blocks, 1
    # Concurrent blocks read as many bytes of x as of weights.
    band = round(math.sqrt(multiprocessors * tile.rows * tile.tap_chunk / (CONSUMERS * tile.advance)))
    return blocks, max(1, min(band, -(-column_tiles // config.regions)))


def turns_of(config: Config, row_tiles: int, column_tiles: int, multiprocessors: int) -> int:
    """Return the turns of the busiest multiprocessor."""
    blocks = grid_of(config, row_tiles, column_tiles, multiprocessors)
    waves = -(-blocks // multiprocessors)  # above 1 with more row tiles than multiprocessors
    return waves * -(-(-(-column_tiles // config.regions) * row_tiles) // blocks)


def stores_of(config: Config) -> float:
    """Return the clocks in which a warpgroup stores a tile."""
    tile = config.tile
    if tile.part:
        return PART + PART_ROW * tile.rows
    if not config.bulk_channels:
        row = ROUNDS_ROW if config.by_rows else RUNS_ROW * (HALVES if tile.out_dtype.itemsize == 2 else 1)
        return tile.rows * row * (1 if config.paired else IN_TURN)
    written = tile.rows * ((tile.span + 1) / 2 if tile.empty_slots else 1)  # empty slots cost half
    waits = (tile.channels // config.bulk_channels - 1) * BULK_BYTE * config.buffer_bytes * config.regions
    return BULK + BULK_ROW * written + waits


def cost(problem: Problem, config: Config, device: Device) -> float:
    """Return the predicted milliseconds of a configuration, without the launch overhead."""
    second = second_stage_ms(problem, config.splits, config.tile.itemsize)
    return _first_stage_ms(split(problem, config.splits), config, device) + second


def _first_stage_ms(problem: Problem, config: Config, device: Device) -> float:
    """Return the predicted milliseconds of k6's kernel and what runs before it; ``problem``: split."""
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


def share(problem: Problem, config: Config, device: Device) -> float:
    """Return the share of the multiprocessors that have a tile without a split; above 1, all have one."""
    tiles = config.tile.row_tiles(problem) * problem.groups * column_tiles(problem, config)
    return tiles / (config.regions * device.multiprocessors)


def split_configs(problem: Problem, precision: str, share: float = 0.0) -> list[Config]:
    """Return the configurations with split sums; ``share``: of the multiprocessors, filled without a split."""
    return [
        config
        for splits in worthwhile(problem, share)
        for config in configs(split(problem, splits), precision, wide_outputs=True, splits=splits)
    ]


@lru_cache(maxsize=1024)
def choose_whole(problem: Problem, precision: str) -> Config | None:
    """Return the cheapest configuration of a problem on an H200 without a split, or None if it has none."""
    return min(configs(problem, precision), key=lambda config: cost(problem, config, H200), default=None)


@lru_cache(maxsize=1024)
def choose(problem: Problem, precision: str) -> Config | None:
    """Return the cheapest configuration of a problem on an H200, split or whole, or None if it has none."""
    whole = choose_whole(problem, precision)
    if whole is None or (filled := share(problem, whole, H200)) >= 1:
        return whole
    found = split_configs(problem, precision, filled)
    best = min(found, key=lambda config: cost(problem, config, H200), default=whole)
    return best if cost(problem, best, H200) + LEAST_GAIN < cost(problem, whole, H200) else whole
