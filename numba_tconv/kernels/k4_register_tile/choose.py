"""The choice of a tile, and split-K.

Many rounds of blocks are weighed by throughput (``cost``), few by the busiest multiprocessor (``few_cost``)."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.split_sums import LEAST_GAIN, second_stage_ms, split, worthwhile
from numba_tconv.runtime.device import H200, REGISTERS, Device
from numba_tconv.runtime.elements import ELEMENTS

from .tile import WINDOW_LIMIT, Config, fits, make, storing_vectors, terms_of_a_partial_sum

SIZES = "block_m", "block_n", "thread_m", "thread_n", "lanes_m", "min_blocks"
# {accumulator bytes: SIZES}; min_blocks: the H200's.
TILES = {
    4: (
        (64, 128, 8, 8, 8, 4),
        (128, 128, 8, 8, 8, 2),
        (128, 128, 16, 8, 8, 2),
        (32, 256, 4, 8, 8, 2),
        (16, 512, 4, 8, 4, 2),
        (8, 512, 4, 8, 2, 4),
        (4, 512, 4, 8, 1, 2),
    ),
    8: (
        (64, 64, 4, 8, 8, 2),
        (32, 128, 4, 8, 8, 2),
        (16, 256, 4, 8, 4, 2),
        (8, 256, 4, 8, 2, 4),
        (4, 256, 4, 8, 1, 8),
    ),
}
# For few blocks: SIZES and the deepest stage.
FEW_TILES = (
    (192, 96, 12, 12, 16, 2, 16),
    (96, 192, 12, 12, 8, 2, 16),
    (256, 24, 8, 4, 16, 2, 16),
    (32, 64, 4, 4, 4, 5, 32),
)
# For rows of unequal taps: each warp has one phase.
APART = dict(block_n=64, thread_m=4, thread_n=8, lanes_m=4, min_blocks=4, deepest=8, stages=(2,))
MOST_PHASES = 8

MOST_ROUNDS = 4
FEW_ROUNDS = 2  # with fewer, ``few_cost`` decides
CLEARLY = 0.98  # share of the usual tile's time
CALL = 0.02  # ms; below, another launch gains nothing

# Fitted to many blocks.
RATE = 2.8e8
FEWEST_WARPS = 5.2  # that hide latency
COPY = 92  # multiply-adds of a copy
STAGE = 7.5e-5  # ms of latency
STORE = 5.4e-7  # ms a sum of a block
LOAD = 0.92  # multiply-adds of a shared load

# Fitted to few blocks on Hopper, in clocks of a scheduler.
SCHEDULERS = 4
CLOCKS = 1.64e6  # in a millisecond
CHANNEL = 31  # a warp's loads and loop
LATENCY = 32  # of these loads
ALONE = 360  # a stage's barriers, for a lone block
FEW_COPY = 0.26  # a copy
POSITION = 1.33  # an output's place
LAUNCH = 0.0049  # ms


@lru_cache(maxsize=1024)
def choose(problem: Problem, dtype: torch.dtype, x_vector: int = 1, device: Device = H200) -> Config:
    """The fastest configuration by estimate; ``x_vector``: elements of a cp.async."""

    def time(config):
        return cost(problem, config, device)

    whole = min(candidates(problem, dtype, x_vector, device), key=time)
    share = blocks(problem, whole) / (whole.min_blocks * device.multiprocessors)
    if dtype != torch.float32 or share >= MOST_ROUNDS:  # partial sums are float32
        return whole
    parts = worthwhile(problem, share, MOST_ROUNDS) if time(whole) >= CALL else []
    split_sums = (c for splits in parts for c in candidates(problem, dtype, x_vector, device, splits))
    best = min(split_sums, key=time, default=whole)
    usual = best if time(best) + LEAST_GAIN < time(whole) else whole
    few = share < FEW_ROUNDS and device.cc >= (9, 0)
    return clearly_better(problem, usual, x_vector, device, [1, *parts]) if few else usual


def clearly_better(problem: Problem, usual: Config, x_vector: int, device: Device, parts: Iterable[int]) -> Config:
    """The fastest by ``few_cost`` if CLEARLY faster than ``usual``, else ``usual``."""
    least, best, number = CLEARLY * few_cost(problem, usual, device), usual, usual.splits
    for splits in parts:
        part, second = split(problem, splits), second_stage_ms(problem, splits, 4)
        usual_tiles = candidates(problem, torch.float32, x_vector, device, splits)
        for config in (*usual_tiles, *few_tiles(part.layer, x_vector, device)):
            time = few_milliseconds(part, config, device) + second
            if time < least:
                least, best, number = time, config, splits
    return replace(storing_vectors(best, split(problem, number)), splits=number)


def register_window(device: Device) -> int:
    return WINDOW_LIMIT if device.cc >= (9, 0) else 8  # before Hopper, addresses take more registers


def spills(config: Config, device: Device) -> bool:
    if config.thread_m * config.thread_n < 64 or REGISTERS // (config.threads * config.min_blocks) > 128:
        return False
    if config.x_vector == 1:
        return device.cc < (9, 0) and config.threads > 128
    return config.window > register_window(device)


def least_waste(layer: Problem, deepest: int) -> list[int]:
    """Channels of a stage, fewest wasted first."""
    depth = layer.in_channels_per_group
    return sorted(range(2, deepest + 1, 2), key=lambda k: (-(-depth // k) * k, -k))


def candidates(problem: Problem, dtype: torch.dtype, x_vector: int, device: Device, splits: int = 1) -> list[Config]:
    """The usual tiles that fit, in ``splits`` parts."""
    part = split(problem, splits)
    return [storing_vectors(config, part) for config in tiles(part.layer, dtype, x_vector, device, splits)]


@lru_cache(maxsize=1024)
def tiles(layer: Problem, dtype: torch.dtype, x_vector: int, device: Device, splits: int) -> tuple[Config, ...]:
    """The usual tiles of a part's layer."""
    share = device.shared_per_multiprocessor / H200.shared_per_multiprocessor
    ways = (False, True) if layer.kernel_size % layer.taps.rows else (False,)
    found = []
    for sizes, one_phase in itertools.product(TILES[ELEMENTS[dtype].accumulator.bitwidth // 8], ways):
        tile = dict(zip(SIZES, sizes, strict=True), x_vector=x_vector, one_phase=one_phase, splits=splits)
        tile["min_blocks"] = max(2, min(tile["min_blocks"], round(tile["min_blocks"] * share)))
        for block_k in least_waste(layer, 16):
            config = make(layer, dtype, block_k, **tile)
            short = config.partial == 0 or block_k * config.tap_chunk <= terms_of_a_partial_sum(layer) or block_k == 2
            if config.window > register_window(device):
                config = replace(config, min_blocks=min(3, config.min_blocks))
            if short and fits(config, device) and not spills(config, device):
                found.append(config)
                break
    return tuple(found)


@lru_cache(maxsize=1024)
def few_tiles(layer: Problem, x_vector: int, device: Device) -> tuple[Config, ...]:
    """Tiles for few blocks; none before Hopper."""
    if device.cc < (9, 0):
        return ()
    if layer.kernel_size % layer.taps.rows:
        several = 1 < layer.taps.rows <= MOST_PHASES
        sized = [dict(APART, block_m=16 * layer.taps.rows, apart=True)] if several else []
    else:
        sized = [dict(zip((*SIZES, "deepest"), sizes, strict=True)) for sizes in FEW_TILES]
    deep = (with_stages(layer, device, x_vector=x_vector, **size) for size in sized)
    return tuple(config for config in deep if config)


def with_stages(layer: Problem, device: Device, deepest: int, stages=(3, 2), **tile) -> Config | None:
    """The tile with the first of ``stages`` that fits."""
    for block_k in least_waste(layer, deepest):
        config = make(layer, torch.float32, block_k, **tile)
        short = config.partial == 0 or block_k * config.tap_chunk <= terms_of_a_partial_sum(layer)
        fitting = (way for n in stages if fits(way := replace(config, stages=n), device))
        if short and config.window <= register_window(device) and (found := next(fitting, None)):
            return found
    return None


def blocks(problem: Problem, config: Config) -> int:
    column_tiles = -(-problem.batch * config.columns(problem)[1] // config.block_n)
    return column_tiles * config.row_tiles(problem) * problem.groups


def rounds(problem: Problem, config: Config, device: Device) -> tuple[int, int]:
    """Full rounds, and a multiprocessor's most blocks in the last."""
    full, last = divmod(blocks(problem, config), device.multiprocessors * config.min_blocks)
    return full, -(-last // device.multiprocessors)


def cost(problem: Problem, config: Config, device: Device) -> float:
    """Estimated milliseconds with the second stage, without launch."""
    c, part = config, split(problem, config.splits)
    stages = c.channel_chunks(part) * c.tap_chunks(part)
    copies = c.x_stage / c.x_vector + c.w_stage / c.vector
    loads = LOAD * (1 / c.thread_m + 1 / c.block_k)
    products = c.block_m * c.block_n * c.block_k * c.multiplied_taps(part)
    block = stages * (products * (1 + loads) + COPY * copies)
    rate = RATE * 4 / c.itemsize

    def milliseconds(resident):
        idle = max(1, FEWEST_WARPS / (resident * c.threads / 32))
        store = STORE * c.block_m * c.block_n * c.itemsize / 4
        return resident * idle * block / rate + stages * STAGE + store

    full, last = rounds(part, config, device)
    first = full * milliseconds(c.min_blocks) + (milliseconds(last) if last else 0)
    return first + second_stage_ms(problem, c.splits, c.itemsize)


def busiest_rounds(problem: Problem, config: Config, device: Device) -> Iterator[tuple[int, int, int]]:
    """The busiest multiprocessor's rounds: (number of equal ones, blocks, their warps with columns)."""
    columns, rows = problem.batch * config.columns(problem)[1], config.row_tiles(problem) * problem.groups
    column_tiles, warp_columns = -(-columns // config.block_n), config.block_n // config.warps_n
    warps = config.warps_m * config.warps_n
    of_last = config.warps_m * -(-(columns - (column_tiles - 1) * config.block_n) // warp_columns)
    most = -(-column_tiles * rows // device.multiprocessors)
    full = most if of_last == warps else min(most, -(-(column_tiles - 1) * rows // device.multiprocessors))
    whole, left = divmod(full, config.min_blocks)
    last = min(-full % config.min_blocks, most - full)  # last tiles, in the round of the last full ones
    last_whole, last_left = divmod(most - full - last, config.min_blocks)
    yield whole, config.min_blocks, config.min_blocks * warps
    yield min(left, 1), left + last, left * warps + last * of_last
    yield last_whole, config.min_blocks, config.min_blocks * of_last
    yield min(last_left, 1), last_left, last_left * of_last


def few_milliseconds(problem: Problem, config: Config, device: Device) -> float:
    """Estimated milliseconds of few blocks, without the second stage."""
    c = config
    alike = [r for r in busiest_rounds(problem, c, device) if r[0]]
    taps = c.multiplied_taps(problem) if c.apart else c.tap_chunk  # the longest row decides
    a_warp = c.block_k * (taps * c.thread_m * c.thread_n + CHANNEL / c.at_once)
    waits = c.block_k * LATENCY / c.at_once
    copies = FEW_COPY * (c.x_stage / c.x_vector + c.w_stage / c.vector)
    store = POSITION * max(c.block_n * c.phases * c.taps.gap, c.threads)
    stages = c.channel_chunks(problem) * c.tap_chunks(problem)

    def clocks(resident, warps):
        busy = -(-warps // SCHEDULERS) * a_warp + resident * copies
        alone = a_warp + waits + resident * copies
        hidden = (busy**4 + alone**4) ** 0.25  # a smooth maximum
        return stages * (hidden + ALONE / resident**2) + resident * store

    return LAUNCH + sum(number * clocks(resident, warps) for number, resident, warps in alike) / CLOCKS


def few_cost(problem: Problem, config: Config, device: Device) -> float:
    first = few_milliseconds(split(problem, config.splits), config, device)
    return first + second_stage_ms(problem, config.splits, config.itemsize)
