"""Chooses by a cost model how tiles fill a GPU."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients import planes
from numba_tconv.gradients.wgmma_ring import (
    ARRIVING,
    CONSUMERS,
    MOST_CHANNELS,
    PRODUCTS,
    REGISTERS,
    SHARED,
    STAGE_CLOCKS,
    deepest,
)
from numba_tconv.kernels.common.tensor_map import ALIGNMENT
from numba_tconv.runtime.device import H200, Device

from . import epilogue
from .tile import Config, Window, accesses

MOST_SUMS, OTHER_REGISTERS = 192, 30
MOST_PLACES = 12  # of a row; more compile slowly
WORD = 4  # bytes
LARGEST_SHARE = 0.95  # of the usual tile's clocks; below, another is taken
LONGEST_SUM = 1 << 15  # positions of a split: tensor cores truncate
FIRST_STAGES = 4  # stages with latency that nothing hides
# Fitted: clocks of the second launch; bytes that it, or a direct store, moves a clock.
SECOND_STAGE, MOVED = 5000, 1640


@lru_cache(maxsize=1024)
def choose_for(problem: Problem, precision: str, alike: int, device: Device) -> tuple[planes.Config | None, Config]:
    """Configurations of planes (None: grad_output is read in place) and tile; ``alike``: grad_output's rows_alike."""
    in_place = choose(problem, precision, alike) if alike else None
    if in_place:
        return None, filling(problem, in_place, device)
    separated = planes.make_config(problem, DTYPES[precision])
    return separated, filling_planes(problem, choose(problem, precision, 0), separated.phases, device)


def choose(problem: Problem, precision: str, alike: int) -> Config | None:
    """The tile with fewest clocks; ``alike`` 0 reads planes."""
    return _choose(problem.layer, precision, alike)


@lru_cache(maxsize=1024)
def _choose(layer: Problem, precision: str, alike: int) -> Config | None:
    def best(by_taps):
        kind = (config for config in candidates(layer, precision, alike) if config.by_taps == by_taps)
        return min(kind, key=lambda config: cost(layer, config), default=None)

    usual, by_taps = best(False), best(True)
    clearly = usual is None or (by_taps and cost(layer, by_taps) < LARGEST_SHARE * cost(layer, usual))
    return by_taps if clearly else usual


@lru_cache(maxsize=1024)
def filling_planes(problem: Problem, config: Config, phases: int, device: Device) -> Config:
    direct = epilogue.planes_suit(problem, config, phases) and whole_is_faster(problem, config, device)
    return replace(config, direct=True, plane_phases=phases) if direct else config


@lru_cache(maxsize=1024)
def filling(problem: Problem, config: Config, device: Device) -> Config:
    """The tile, or a clearly better one of the other kind, ``direct`` where faster."""

    def stored(config):
        direct = epilogue.suits(problem, config) and whole_is_faster(problem, config, device)
        return replace(config, direct=direct)

    def clocks(config):
        return (_whole if config.direct else _several)(problem, config, device)

    usual = stored(config)
    others = likely(problem.layer, config.precision, config.alike, not config.by_taps)
    best = min(map(stored, others), key=clocks, default=usual)
    return best if clocks(best) < LARGEST_SHARE * clocks(usual) else usual


@lru_cache(maxsize=1024)
def likely(layer: Problem, precision: str, alike: int, by_taps: bool) -> tuple[Config, ...]:
    best = {}
    for config in candidates(layer, precision, alike):
        size = config.tap_chunk, config.blocks, config.channels, config.alternate
        if config.by_taps == by_taps and (size not in best or cost(layer, config) < cost(layer, best[size])):
            best[size] = config
    return tuple(best.values())


def candidates(problem: Problem, precision: str, alike: int) -> Iterator[Config]:
    t = problem.taps
    phases = min(t.rows, problem.kernel_size)
    window, clears = Window(1, 1, 1, t.step, False), 0
    if alike:
        window = Window(problem.stride, problem.dilation, phases, t.step, problem.padding % 2 == 1)
        clears = problem.padding if alike > 1 else 0
    if alike > 1 and problem.groups > 1 and problem.out_channels_per_group % alike:
        return  # groups' first rows are of different sets
    if alike > ALIGNMENT // WORD and window.stride == 1:
        return  # rows begin within a word
    read = precision, window, max(1, alike), clears
    for tap_chunk in range(1, min(t.taps_per_row, MOST_SUMS // 4) + 1):
        if window.stride == 1 and tap_chunk < t.taps_per_row and tap_chunk * t.step % 2:
            continue  # words would begin at even elements in one chunk, at odd ones in the next
        yield from _sized(problem, Config(*read, tap_chunk, 0, 0, False))
    if alike and t.taps_per_row > 1 and window.stride > 1:
        by_taps = replace(window, phases=problem.kernel_size)
        yield from _sized(problem, Config(precision, by_taps, *read[2:], 1, 0, 0, False, by_taps=True))


def _sized(problem: Problem, config: Config) -> Iterator[Config]:
    for blocks in (1, 2):
        for alternate in (False, True):
            most = min(MOST_CHANNELS, 2 * MOST_SUMS // (blocks * config.tap_chunk) // 8 * 8)
            fewest = -(-problem.in_channels_per_group // most) if most else 0
            for tiles in (fewest, fewest + 1) if most else ():
                channels = -(-problem.in_channels_per_group // tiles // 8) * 8
                for sets in (2, 1):
                    sizes = dict(blocks=blocks, channels=channels, alternate=alternate, sets=sets)
                    yield from _fitting(replace(config, **sizes))


def _fitting(config: Config) -> Iterator[Config]:
    spare = REGISTERS[0] - OTHER_REGISTERS - 2 * config.blocks - config.sums
    if not config.g_channels or not config.boxes or config.sets * config.operands > spare:
        return
    if config.clears > config.positions // config.pieces * config.window.stride:
        return
    if max(len(config.places), len(config.entries)) > MOST_PLACES:
        return
    # Alternating warpgroups have their own stages: a waiting one has seen its stage's last use.
    if deep := deepest(config, 2 if config.alternate else 1):
        yield deep


@lru_cache(maxsize=8192)
def stage_clocks(config: Config) -> float:
    warpgroups = 1 if config.alternate else CONSUMERS
    products = PRODUCTS * warpgroups * config.blocks * config.tap_chunk
    a_load = accesses(config.window, config.alike, config.itemsize, config.by_taps, config.width)
    operands = PRODUCTS * warpgroups * 4 * config.blocks * 2 * len(config.places) * a_load
    shared = operands + (products * config.channels * 32 + config.stage_bytes) / SHARED
    alone = STAGE_CLOCKS if config.sets == 1 else 0
    return max(products * config.channels / 2, shared, config.arriving) + STAGE_CLOCKS + alone


def cost(problem: Problem, config: Config) -> float:
    return config.blocks_of(problem) * stage_clocks(config)


@lru_cache(maxsize=1024)
def splits_of(problem: Problem, config: Config, device: Device = H200) -> int:
    """Splits with the fewest clocks, none longer than LONGEST_SUM."""
    _, stages = config.stages_of(problem)
    blocks = config.blocks_of(problem)
    of_split = 3 * 4 * config.tile_sums * (2 if config.alternate else 1) / ARRIVING

    def clocks(splits):
        rounds = -(-blocks * splits // device.multiprocessors)
        return _multiplying(problem, config, splits, device) + rounds * of_split

    least = -(-stages * config.positions // LONGEST_SUM)
    most = max(least, min(stages, -(-4 * device.multiprocessors // blocks)))
    return min(range(least, most + 1), key=clocks)


@lru_cache(maxsize=1024)
def whole_is_faster(problem: Problem, config: Config, device: Device = H200) -> bool:
    _, stages = config.stages_of(problem)
    if stages * config.positions > LONGEST_SUM:
        return False
    alone = splits_of(problem, config, device) == 1
    return alone or _whole(problem, config, device) < _several(problem, config, device)


def _multiplying(problem: Problem, config: Config, splits: int, device: Device) -> float:
    _, stages = config.stages_of(problem)
    rounds = -(-config.blocks_of(problem) * splits // device.multiprocessors)
    return rounds * (-(-stages // splits) + FIRST_STAGES) * stage_clocks(config)


def _several(problem: Problem, config: Config, device: Device) -> float:
    splits = splits_of(problem, config, device)
    sums = config.blocks_of(problem) * config.tile_sums
    return _multiplying(problem, config, splits, device) + SECOND_STAGE + 2 * 4 * splits * sums / MOVED


def _whole(problem: Problem, config: Config, device: Device) -> float:
    sums = config.blocks_of(problem) * config.tile_sums
    return _multiplying(problem, config, 1, device) + config.itemsize * sums / MOVED
