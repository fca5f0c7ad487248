"""Tile and splits by a cost model."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients import window as grad_window
from numba_tconv.gradients.sum import BATCH
from numba_tconv.gradients.window import Window
from numba_tconv.kernels.common.split_sums import SECOND_LAUNCH, SUM_BANDWIDTH
from numba_tconv.runtime.device import H200, REGISTERS, RESERVED_SHARED, Device
from numba_tconv.runtime.elements import ELEMENTS

from .tile import ALL, PARTIAL_TERMS, REST, SPLIT_COLUMNS, THREADS, WHOLE, Config, make, rows_of, unequal

CLEARLY = 0.95  # share of the usual tile's time that others must undercut
LENGTHS = 128, 512, 8192
MOST_ROUNDS = 4  # unless sums need more
MOST_SUMS = {4: 96, 8: 32}  # of a thread, by a sum's bytes: unrolled times a vector
# Registers beside sums and operands; least; more except in float32.
ADDRESSES, LEAST_REGISTERS, MORE_REGISTERS = 48, 96, 24
LEAST_BLOCKS = 2  # one multiplies while the other waits
BANKED = 8  # phases whose columns lie in different banks

SCHEDULERS = 4
CLOCKS = 1.53e6  # a millisecond
LAUNCH = 0.006  # ms
# A scheduler's clocks for a warp; a multiply-add takes one.
LOAD, COPY = 1.7, 2  # shared vector; element
LOCATE, CONFLICT = 40, 15  # a column; another access of the same banks
STAGE, BLOCK = 100, 760
VECTOR_LATENCY, STAGE_LATENCY = 100, 1050  # alone: a turn's loads; copies
STORE, STORE_SHARED, SLICE = 7, 70, 30  # a sum from registers; through shared memory; for each slice
TOGETHER = 3.5  # exponent of the power mean of clocks issued and waited
SECOND_LATENCY = 0.0002  # ms a batch of loads


@lru_cache(maxsize=1024)
def choose(problem: Problem, dtype: torch.dtype, device: Device = H200) -> Config:
    usual, *others = tiles(problem.layer, dtype, device)
    time = partial(_time, problem, device)
    best = min(others, key=time, default=usual)
    return best if time(best) < CLEARLY * time(usual) else usual


def _time(problem: Problem, device: Device, config: Config) -> float:
    estimate = milliseconds(problem, config, device)
    return min(estimate(*parts) for parts in divisions(problem, config, device))


@lru_cache(maxsize=1024)
def splits_of(problem: Problem, config: Config, device: Device = H200) -> tuple[int, int]:
    estimate = milliseconds(problem, config, device)
    return min(divisions(problem, config, device), key=lambda parts: estimate(*parts))


def divisions(problem: Problem, config: Config, device: Device) -> list[tuple[int, int]]:
    """Splits and their length: for each number of blocks a multiprocessor, the most with sums short enough."""
    stages, blocks = max(1, config.stages(problem)), config.blocks(problem)
    longest = min(max(SPLIT_COLUMNS, PARTIAL_TERMS * tile.slices) for tile in config.tiles)
    least = -(-stages * config.block_l // longest)
    fewest = -(-least * blocks // device.multiprocessors)
    most = max(MOST_ROUNDS * config.min_blocks, fewest)
    found = (min(stages, device.multiprocessors * each // blocks) for each in range(fewest, most + 1))
    lengths = {-(-stages // splits) for splits in found}
    return [(-(-stages // length), length) for length in sorted(lengths, reverse=True)]


@lru_cache(maxsize=1024)
def tiles(layer: Problem, dtype: torch.dtype, device: Device) -> tuple[Config, ...]:
    """The tile of fewest instructions, then (float32, float64 from Hopper on) the fastest at LENGTHS."""
    found = [*candidates(layer, dtype, device), *_of_two_kinds(layer, dtype, device)]

    def best(cost, least):
        lowest, chosen = math.inf, None
        for bound, _, z in sorted((least(config), -config.vectors_a_turn, z) for z, config in enumerate(found)):
            if bound >= lowest:
                break
            if (of_this := cost(found[z])) < lowest:
                lowest, chosen = of_this, found[z]
        return chosen

    usual = best(partial(instructions, layer), partial(products, layer))
    if dtype.itemsize < 4 or device.cc < (9, 0):
        return (usual,)
    samples = (replace(layer, length=max(layer.length, length)) for length in LENGTHS)
    others = (best(partial(_time, sample, device), partial(least_ms, sample, device)) for sample in samples)
    return tuple(dict.fromkeys((usual, *others)))


def min_blocks(config: Config, device: Device) -> int:
    words = config.itemsize // 4 * (config.sums + config.thread_m * config.vector + config.window_columns)
    more = MORE_REGISTERS if config.dtype != torch.float32 else 0
    registers = min(255, -(-(max(ADDRESSES + words, LEAST_REGISTERS) + more) // 8) * 8)
    need = config.shared_bytes + RESERVED_SHARED
    return min(8, REGISTERS // (registers * config.threads), device.shared_per_multiprocessor // need)


def candidates(problem: Problem, dtype: torch.dtype, device: Device, part: str = ALL) -> Iterator[Config]:
    most_sums = MOST_SUMS[ELEMENTS[dtype].accumulator.bitwidth // 8]
    powers = [2**e for e in range(8)]
    phases, _ = rows_of(problem, part)
    pairs = problem.out_channels_per_group * phases
    for thread_m, thread_p in product(powers[:4], powers[:4]):
        for lanes_m, lanes_p in ((m, p) for m, p in product(powers, powers) if m * p <= THREADS):
            block_m, block_p = thread_m * lanes_m, thread_p * lanes_p
            if block_m >= max(2, 2 * problem.in_channels_per_group) or block_p >= max(2, 2 * pairs):
                continue
            tile = dict(thread_m=thread_m, thread_p=thread_p, lanes_m=lanes_m, lanes_p=lanes_p, part=part)
            tile["slices"] = THREADS // (lanes_m * lanes_p)
            for most_phases in (THREADS, BANKED)[: 1 + (min(phases, block_p) > BANKED)]:
                config = make(problem, dtype, most_phases=most_phases, **tile)
                blocks = min_blocks(config, device)
                vectors = not config.partial or config.sums % config.vector == 0  # partial sums are whole vectors
                if blocks >= LEAST_BLOCKS and vectors and config.sums <= most_sums:
                    yield replace(config, min_blocks=blocks)


def _of_two_kinds(layer: Problem, dtype: torch.dtype, device: Device) -> Iterator[Config]:
    """WHOLE tiles, each with the cheapest REST tile that allows as many blocks."""
    if not unequal(layer):
        return
    rests = sorted(candidates(layer, dtype, device, REST), key=partial(instructions, layer))
    for whole in candidates(layer, dtype, device, WHOLE):
        rest = next((rest for rest in rests if rest.min_blocks >= whole.min_blocks), None)
        if rest:
            yield replace(whole, rest_tile=replace(rest, min_blocks=whole.min_blocks))


# Resident blocks hide each other's waits but share the issue slots.


@lru_cache(maxsize=4096)
def _copying(window: Window, locating: float, copy: float) -> float:
    warps = -(-window.lanes * window.phases * window.teams // 32)
    conflicts = max(0.0, min(window.phases, 32) / BANKED - 1) if window.phases > 1 else 0.0
    turns = -(-window.channels // window.teams)
    return warps * window.slots * (locating + turns * (copy + CONFLICT * conflicts))


def _loads(config: Config) -> int:
    return config.thread_m + config.thread_p * config.window_columns // config.vector


def products(problem: Problem, config: Config) -> float:
    """Multiplying and loading instructions a position."""
    return sum(c.own_blocks(problem) * c.slice_threads * (c.sums + 3 * _loads(c) / c.vector) for c in config.tiles)


def instructions(problem: Problem, config: Config) -> float:
    """Instructions a position, the cost of long sums."""
    copying = 0.0
    for tile in config.tiles:
        windows = tile.x_window, tile.window
        a_stage = sum(32 * _copying(window, window.locating, grad_window.COPY) for window in windows)
        copying += tile.own_blocks(problem) * a_stage / tile.block_l
    return products(problem, config) + copying


def _multiplying(config: Config) -> float:
    c = config
    turns = c.block_l // (c.slices * c.vector)
    return turns * c.itemsize // 4 * (c.sums * c.vector + LOAD * _loads(c))


@lru_cache(maxsize=4096)
def _issued(config: Config) -> float:
    """A scheduler's clocks for a warp's stage, on average."""
    copying = sum(_copying(window, LOCATE, COPY) for window in (config.x_window, config.window))
    partial_sums = 2 * config.sums / config.partial if config.partial else 0
    return _multiplying(config) + copying / (config.threads / 32) + partial_sums + STAGE


@lru_cache(maxsize=4096)
def _blocks(config: Config, resident: int) -> tuple[float, float]:
    """Clocks of a stage of ``resident`` blocks, and of begin and end."""
    c = config
    a_warp, warps, sums = _issued(c), resident * c.threads / 32, c.sums / c.slices
    alone = a_warp + VECTOR_LATENCY * (c.block_l // (c.slices * c.vector)) + STAGE_LATENCY
    a_stage = ((-(-warps // SCHEDULERS) * a_warp) ** TOGETHER + alone**TOGETHER) ** (1 / TOGETHER)
    a_sum = STORE if c.slices == 1 else STORE_SHARED + SLICE * c.slices
    return a_stage, BLOCK + warps / SCHEDULERS * sums * a_sum


def second_stage_ms(problem: Problem, splits: int) -> float:
    if splits == 1:
        return 0.0
    elements = problem.in_channels * problem.out_channels_per_group * problem.kernel_size
    waits = -(-splits // BATCH) * SECOND_LATENCY
    return SECOND_LAUNCH + waits + 4 * (splits + 1) * elements / SUM_BANDWIDTH


def _last_round(own_blocks: int, config: Config, places: int) -> float:
    """Share of a block's time in the last round, after ``places`` blocks; it may hold REST blocks alone."""
    if not config.rest_tile or own_blocks > places:
        return 1.0
    of_rest, own = (_issued(tile) / tile.block_l for tile in (config.rest_tile, config))
    return min(1.0, of_rest / own)


def milliseconds(problem: Problem, config: Config, device: Device) -> Callable[[int, int], float]:
    """Build (splits, stages of each) -> estimated ms."""
    own_blocks, blocks = config.own_blocks(problem), config.blocks(problem)

    def of(splits: int, length: int) -> float:
        most = -(-blocks * splits // device.multiprocessors)
        whole, last = divmod(most, config.min_blocks)
        share = _last_round(own_blocks * splits, config, whole * config.min_blocks * device.multiprocessors)
        clocks = 0.0
        for rounds, resident in ((whole, config.min_blocks), (share * min(last, 1), last)):
            if rounds:
                a_stage, ends = _blocks(config, resident)
                clocks += rounds * (length * a_stage + ends)
        return LAUNCH + clocks / CLOCKS + second_stage_ms(problem, splits)

    return of


def least_ms(problem: Problem, device: Device, config: Config) -> float:
    clocks = sum(c.own_blocks(problem) * c.stages(problem) * _multiplying(c) * c.threads / 32 for c in config.tiles)
    return clocks / SCHEDULERS / device.multiprocessors / CLOCKS
