"""Chooses by a cost model, fitted to measurements.

A stage lasts as long as its products and copies together. Stores hide behind products unless both warpgroups store."""

import math
from functools import lru_cache

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.split_sums import LEAST_GAIN, second_stage_ms, split, worthwhile
from numba_tconv.runtime.device import H200, Device

from . import input as k6_input
from .tile import BLOCKS, CONSUMERS, MOST_STAGES, Config, channel_chunks, column_tiles, configs, sample_columns
from .unpacked import with_unpacked

CLOCK = 1.755e6  # clocks a millisecond
BANDWIDTH = 3.704e9  # bytes a millisecond
LOADED = 3.83e7  # bytes of resident weights a millisecond
EXPOSED = 0.05  # of the shorter of memory's and compute's time
BULK_TRAFFIC = 1.096  # factor of memory time
ENDS = 667  # bytes of a run's unaligned ends, times an element's bytes
# Clocks, and factors:
PRODUCT = 0.155  # a row of a 64-column product
SPLIT = 2.5  # factor of split products
WINDOW_ROW, WINDOW_BYTE = 6.2, 0.03  # the copy engine's, a row and a byte
# Slowdown by the ring's missing share: cooperative, ping-pong.
SHALLOW, SHALLOW_IN_TURN = 1.6, 2.75
ALONE = 641  # a stage, beside a store
BULK, BULK_ROW = 50, 18.7  # a tile, a row
BULK_BYTE = 0.0348  # a byte that leaves before the next round
# A row by store_runs.py, its factor in 16 bits; a row by rows.py; the factor with a shared buffer.
RUNS_ROW, HALVES, ROUNDS_ROW, IN_TURN = 81.8, 1.162, 48.7, 0.654
# A part of the phases: a tile's and a row's stores, a stage, SHALLOW.
BY_PHASES, BY_PHASES_ROW, BY_PHASES_STAGE, BY_PHASES_SHALLOW = 1500, 45, 200, 1.1
TAIL, TAIL_STAGE = 0.0075, 5.8e-5  # ms: a launch, a stage
TENSOR = 0.5  # least PRODUCT of a part of the phases
LARGE_WEIGHTS, FEW_PAIRS = 1 << 25, 2  # unpacked: from so many bytes on, up to so many pairs of tiles


def blocks_of(config: Config, row_tiles: int, column_tiles: int, multiprocessors: int) -> int:
    """Blocks, about one a multiprocessor; resident: as many for each row tile."""
    pairs = -(-column_tiles // config.regions)
    if config.resident:
        return row_tiles * max(1, min(multiprocessors // row_tiles, pairs))
    return min(multiprocessors, pairs * row_tiles)


def blocks_and_band(config: Config, row_tiles: int, column_tiles: int, multiprocessors: int) -> tuple[int, int]:
    """The blocks, and Grid.band."""
    tile, blocks = config.tile, blocks_of(config, row_tiles, column_tiles, multiprocessors)
    if config.resident:
        return blocks, 1
    # Concurrent blocks read equal bytes of x and weights.
    band = round(math.sqrt(multiprocessors * tile.rows * tile.tap_chunk / (CONSUMERS * tile.advance)))
    return blocks, max(1, min(band, -(-column_tiles // config.regions)))


def turns_of(config: Config, row_tiles: int, column_tiles: int, multiprocessors: int) -> int:
    """The busiest multiprocessor's tiles, or pairs."""
    blocks = blocks_of(config, row_tiles, column_tiles, multiprocessors)
    waves = -(-blocks // multiprocessors)
    return waves * -(-(-(-column_tiles // config.regions) * row_tiles) // blocks)


def stores_of(config: Config) -> float:
    """Clocks to store a tile."""
    tile = config.tile
    if tile.by_phases:
        return BY_PHASES + BY_PHASES_ROW * tile.rows
    if not config.bulk_channels:
        row = ROUNDS_ROW if config.by_rows else RUNS_ROW * (HALVES if tile.out_dtype.itemsize == 2 else 1)
        return tile.rows * row * (1 if config.paired else IN_TURN)
    written = tile.rows * ((tile.span + 1) / 2 if tile.has_gaps else 1)
    waits = (tile.channels // config.bulk_channels - 1) * BULK_BYTE * config.buffer_bytes * config.regions
    return BULK + BULK_ROW * written + waits


def cost(problem: Problem, config: Config, device: Device) -> float:
    """Predicted milliseconds, without launch overhead."""
    second = second_stage_ms(problem, config.splits, config.tile.itemsize)
    return _first_stage_ms(split(problem, config.splits), config, device) + second


def _first_stage_ms(problem: Problem, config: Config, device: Device) -> float:
    """``problem``: split."""
    p, tile = problem, config.tile
    stages = tile.tap_chunks(p) * channel_chunks(p, config)
    row_products = tile.tap_chunk * (1 if tile.operand_halves == 1 else 3) * BLOCKS * tile.rows
    products, busy, more = row_products * PRODUCT * (SPLIT if tile.operand_halves == 2 else 1), 0, 0
    if tile.by_phases:
        busy, more = row_products * TENSOR, BY_PHASES_STAGE
    window = tile.depth * (WINDOW_ROW + config.width * tile.itemsize * WINDOW_BYTE)
    copies, stores = config.regions * window, stores_of(config)
    shallow = 1 / (config.depths * config.stages) - 1 / MOST_STAGES
    if config.paired:
        stage = max(2 * products + copies, 2 * busy) + more
        turn = stages * stage * (1 + (BY_PHASES_SHALLOW if tile.by_phases else SHALLOW) * shallow) + stores
    else:
        stage = max(products + copies, busy) + more / 2
        turn = max(stages * stage, (stages * max(products + ALONE, copies) + stores) / 2)
        turn *= 1 + SHALLOW_IN_TURN * shallow
    row_tiles = tile.row_tiles(p) * p.groups
    clocks = turn * turns_of(config, row_tiles, column_tiles(p, config), device.multiprocessors)
    ends = 0 if tile.aligned else p.out_channels * column_tiles(p, config) * ENDS / tile.itemsize
    memory = (p.min_bytes(tile.itemsize) + ends) / BANDWIDTH * (BULK_TRAFFIC if config.bulk_channels else 1)
    shape, groups = p.in_shape, p.groups // config.splits
    before = k6_input.cost(shape, config, groups, sample_columns(p, config))
    if config.tail:
        before += TAIL + TAIL_STAGE * stages
    computed = config.weights / LOADED + clocks / CLOCK
    return before + max(computed, memory) + EXPOSED * min(computed, memory)


def share(problem: Problem, config: Config, device: Device) -> float:
    """Tiles, or pairs, a multiprocessor."""
    tiles = config.tile.row_tiles(problem) * problem.groups * column_tiles(problem, config)
    return tiles / (config.regions * device.multiprocessors)


def split_configs(problem: Problem, precision: str, share: float = 0.0) -> list[Config]:
    return [
        config
        for splits in worthwhile(problem, share)
        for config in configs(split(problem, splits), precision, wide_outputs=True, splits=splits)
    ]


@lru_cache(maxsize=1024)
def choose_whole(problem: Problem, precision: str) -> Config | None:
    """The cheapest configuration without split-K."""
    return min(configs(problem, precision), key=lambda config: cost(problem, config, H200), default=None)


def choose(problem: Problem, precision: str) -> Config | None:
    """The cheapest configuration on ``H200``; weights are unpacked where packing costs more."""
    config = choose_packed(problem, precision)
    return config and (_unpacked(problem, config) or config)


@lru_cache(maxsize=1024)
def _unpacked(problem: Problem, config: Config) -> Config | None:
    p = split(problem, config.splits)
    pairs = -(-column_tiles(p, config) // config.regions)
    large = math.prod(problem.weight_shape) * config.tile.itemsize >= LARGE_WEIGHTS
    return with_unpacked(p, config) if large and pairs <= FEW_PAIRS else None


@lru_cache(maxsize=1024)
def choose_packed(problem: Problem, precision: str) -> Config | None:
    """The cheapest configuration on ``H200`` for packed weights."""
    whole = choose_whole(problem, precision)
    if whole is None or (filled := share(problem, whole, H200)) >= 1:
        return whole
    found = split_configs(problem, precision, filled)
    best = min(found, key=lambda config: cost(problem, config, H200), default=whole)
    return best if cost(problem, best, H200) + LEAST_GAIN < cost(problem, whole, H200) else whole
