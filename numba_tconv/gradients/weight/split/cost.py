"""How long grad_weight_split takes, estimated: what a stage costs a warp, how blocks share the multiprocessors, and the
second stage.

A block alone on a multiprocessor has a warp a scheduler, which waits for each of its loads; three together hide each
other's waits but share what is issued. So neither a block nor a round of blocks has a time of its own: it follows from
the blocks that are resident together.

Fitted to the 60 rows of b135921 at the workloads' own batch and at batch 1 (H200, ieee), with a root mean square of
what it is off of 4%. A sum cost 185 clocks to store then; sums of a single slice go straight from registers since, and
those of the 60 rows of 88bf05e it is off by 5%.
"""

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
CLOCKS = 1.53e6  # in a millisecond
LAUNCH = 0.006  # ms
# Clocks of a scheduler for an instruction of a warp: what is multiplied takes one each.
LOAD = 1.7  # of a vector from shared memory
AIMING = 40  # that finds a column in memory
COPY = 2
CONFLICT = 15  # of a copy, for each time that its columns lie in the same banks again
STAGE = 100  # what begins and ends one
VECTOR_LATENCY, STAGE_LATENCY = 100, 1050  # of a turn's loads and of the copies, unless other warps multiply meanwhile
BLOCK = 760  # what begins and ends one
# Of a sum, not measured: straight from registers; through shared memory, and of each slice that is added up there.
STORE, STORE_SHARED, SLICE = 7, 70, 30
TOGETHER = 3.5  # power mean of what is issued and what is waited for: they hide each other, but for a part
SECOND_LATENCY = 0.0002  # ms, of the loads that a thread of the second stage has under way together


@lru_cache(maxsize=4096)
def _copying(window: Window, aim: float, copy: float) -> float:
    """Clocks of a stage's copies, of all warps of a block."""
    warps = -(-window.lanes * window.phases * window.teams // 32)
    conflicts = max(0.0, min(window.phases, 32) / BANKED - 1) if window.phases > 1 else 0.0
    turns = -(-window.channels // window.teams)
    return warps * window.slots * (aim + turns * (copy + CONFLICT * conflicts))


def _loads(config: Config) -> int:
    """Of a thread, for a vector of positions."""
    return config.thread_m + config.thread_p * config.window_columns // config.vector


def products(problem: Problem, config: Config) -> float:
    """Instructions that multiply, and load what they do, for each position."""
    return sum(c.own_blocks(problem) * c.slice_threads * (c.sums + 3 * _loads(c) / c.vector) for c in config.tiles)


def instructions(problem: Problem, config: Config) -> float:
    """Those, and the ones that copy: what counts where sums are long."""
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
    """Clocks that a scheduler issues to a warp in a stage, on average over the warps."""
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
    """Milliseconds in which another kernel adds up the splits' sums."""
    if splits == 1:
        return 0.0
    elements = problem.in_channels * problem.out_channels_per_group * problem.kernel_size
    waits = -(-splits // BATCH) * SECOND_LATENCY
    return SECOND_LAUNCH + waits + 4 * (splits + 1) * elements / SUM_BANDWIDTH


def _last_round(own_blocks: int, config: Config, places: int) -> float:
    """The share of a block's time that the last blocks take, behind whole rounds of ``places`` blocks: less where they
    are all of the rest, by what its positions take to issue. Not fitted: of 15 tiles and splits of seamless_u1 at batch
    16 the estimate is off by 6%, root mean square (H200, a script)."""
    if not config.rest or own_blocks > places:
        return 1.0
    of_rest, own = (_issued(tile) / tile.block_l for tile in (config.rest, config))
    return min(1.0, of_rest / own)


def milliseconds(problem: Problem, config: Config, device: Device) -> Callable[[int, int], float]:
    """An estimate for an H200: a function of the splits, and of the stages of each."""
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
    """What it takes at least, soon found: the products alone."""
    clocks = sum(c.own_blocks(problem) * c.stages(problem) * _multiplying(c) * c.threads / 32 for c in config.tiles)
    return clocks / SCHEDULERS / device.multiprocessors / CLOCKS
