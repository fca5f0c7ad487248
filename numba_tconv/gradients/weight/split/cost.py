"""The cost model of grad_weight_split, fitted to rows of an H200.

A block alone on a multiprocessor waits for its loads; resident blocks hide each other's waits but share the issue
slots. The time of a block therefore depends on how many are resident."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients import window as grad_window
from numba_tconv.gradients.sum import BATCH
from numba_tconv.gradients.window import Window
from numba_tconv.kernels.common.channel_parts import SECOND_LAUNCH, SUM_BANDWIDTH
from numba_tconv.runtime.device import Device

from .tile import BANKED, Config

SCHEDULERS = 4  # of a multiprocessor
CLOCKS = 1.53e6  # clocks in a millisecond
LAUNCH = 0.006  # ms of a launch
# Clocks of a scheduler for an instruction of a warp; a multiply-add takes one.
LOAD = 1.7  # a vector from shared memory
AIMING = 40  # locate a column in memory
COPY = 2
CONFLICT = 15  # a copy, for each further use of the same banks
STAGE = 100  # begin and end a stage
VECTOR_LATENCY, STAGE_LATENCY = 100, 1050  # of a turn's loads and of the copies, if no other warps multiply
BLOCK = 760  # begin and end a block
# Clocks of a sum: straight from registers; through shared memory; each slice added up there.
STORE, STORE_SHARED, SLICE = 7, 70, 30
TOGETHER = 3.5  # exponent of the power mean of clocks issued and waited, which partly hide each other
SECOND_LATENCY = 0.0002  # ms, of a batch of the second stage's loads


@lru_cache(maxsize=4096)
def _copying(window: Window, aim: float, copy: float) -> float:
    """Clocks of a stage's copies, of all warps of a block."""
    warps = -(-window.lanes * window.phases * window.teams // 32)
    conflicts = max(0.0, min(window.phases, 32) / BANKED - 1) if window.phases > 1 else 0.0
    turns = -(-window.channels // window.teams)
    return warps * window.slots * (aim + turns * (copy + CONFLICT * conflicts))


def _loads(config: Config) -> int:
    """Loads of a thread for a vector of positions."""
    return config.thread_m + config.thread_p * config.window_columns // config.vector


def products(problem: Problem, config: Config) -> float:
    """Instructions that multiply, and that load operands, for each position."""
    return sum(c.own_blocks(problem) * c.slice_threads * (c.sums + 3 * _loads(c) / c.vector) for c in config.tiles)


def instructions(problem: Problem, config: Config) -> float:
    """Instructions that multiply, load and copy, for each position: the cost where sums are long."""
    copying = 0.0
    for tile in config.tiles:
        a_stage = sum(32 * _copying(window, window.aim, grad_window.COPY) for window in (tile.x_window, tile.window))
        copying += tile.own_blocks(problem) * a_stage / tile.block_l
    return products(problem, config) + copying


def _multiplying(config: Config) -> float:
    """Clocks in which a warp multiplies a stage."""
    c = config
    turns = c.block_l // (c.slices * c.vector)
    return turns * c.itemsize // 4 * (c.sums * c.vector + LOAD * _loads(c))


@lru_cache(maxsize=4096)
def _issued(config: Config) -> float:
    """Clocks that a scheduler issues to a warp in a stage, averaged over the warps."""
    copying = sum(_copying(window, AIMING, COPY) for window in (config.x_window, config.window))
    partial = 2 * config.sums / config.partial if config.partial else 0
    return _multiplying(config) + copying / (config.threads / 32) + partial + STAGE


@lru_cache(maxsize=4096)
def _blocks(config: Config, resident: int) -> tuple[float, float]:
    """Clocks of each stage of ``resident`` blocks of a multiprocessor, and of their beginning and end."""
    c = config
    a_warp, warps, sums = _issued(c), resident * c.threads / 32, c.sums / c.slices
    alone = a_warp + VECTOR_LATENCY * (c.block_l // (c.slices * c.vector)) + STAGE_LATENCY
    a_stage = ((-(-warps // SCHEDULERS) * a_warp) ** TOGETHER + alone**TOGETHER) ** (1 / TOGETHER)
    a_sum = STORE if c.slices == 1 else STORE_SHARED + SLICE * c.slices
    return a_stage, BLOCK + warps / SCHEDULERS * sums * a_sum


def second_stage_ms(problem: Problem, splits: int) -> float:
    """Milliseconds of the kernel that adds up the splits' sums."""
    if splits == 1:
        return 0.0
    elements = problem.in_channels * problem.out_channels_per_group * problem.kernel_size
    waits = -(-splits // BATCH) * SECOND_LATENCY
    return SECOND_LAUNCH + waits + 4 * (splits + 1) * elements / SUM_BANDWIDTH


def _last_round(own_blocks: int, config: Config, places: int) -> float:
    """The share of a block's time that the last blocks take, after whole rounds of ``places`` blocks.

    It may be below 1 where all last blocks are of the rest, whose positions take fewer clocks to issue."""
    if not config.rest or own_blocks > places:
        return 1.0
    of_rest, own = (_issued(tile) / tile.block_l for tile in (config.rest, config))
    return min(1.0, of_rest / own)


def milliseconds(problem: Problem, config: Config, device: Device) -> Callable[[int, int], float]:
    """Estimated milliseconds on an H200, as a function of the splits and the stages of each."""
    own_blocks, blocks = config.own_blocks(problem), config.blocks(problem)

    def of(splits: int, length: int) -> float:
        most = -(-blocks * splits // device.multiprocessors)  # blocks of a multiprocessor
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
    """A quick lower bound of the milliseconds: the products alone."""
    clocks = sum(c.own_blocks(problem) * c.stages(problem) * _multiplying(c) * c.threads / 32 for c in config.tiles)
    return clocks / SCHEDULERS / device.multiprocessors / CLOCKS
