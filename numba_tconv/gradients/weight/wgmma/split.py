"""How tiles of grad_weight_wgmma fill a GPU: number of splits, direct stores, and the tile.

With short sums, idle multiprocessors in the last round of blocks and the second stage decide which tile is best."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.wgmma_ring import ARRIVING
from numba_tconv.runtime.device import H200, Device

from . import epilogue as grad_weight_direct
from .tile import LARGEST_SHARE, Config, likely

LONGEST_SUM = 1 << 15  # positions of one split: tensor cores truncate when they add
FIRST_STAGES = 4  # stages of a block whose latency nothing hides
# Fitted on an H200: clocks of the second stage's launch; bytes that it, or a direct store, moves a clock.
SECOND_STAGE, MOVED = 5000, 1640


@lru_cache(maxsize=1024)
def splits_of(problem: Problem, config: Config, device: Device = H200) -> int:
    """Splits with the fewest estimated clocks, none longer than LONGEST_SUM."""
    _, stages = config.stages_of(problem)
    blocks = config.blocks_of(problem)
    # Each split writes its sums, and another kernel reads them.
    of_split = 3 * 4 * config.tile_sums * (2 if config.in_turns else 1) / ARRIVING

    def clocks(splits):
        rounds = -(-blocks * splits // device.multiprocessors)
        return _multiplying(problem, config, splits, device) + rounds * of_split

    least = -(-stages * config.positions // LONGEST_SUM)
    most = max(least, min(stages, -(-4 * device.multiprocessors // blocks)))
    return min(range(least, most + 1), key=clocks)


def _multiplying(problem: Problem, config: Config, splits: int, device: Device) -> float:
    """Estimated clocks until the last block has all products."""
    _, stages = config.stages_of(problem)
    rounds = -(-config.blocks_of(problem) * splits // device.multiprocessors)
    return rounds * (-(-stages // splits) + FIRST_STAGES) * config.clocks


def _several(problem: Problem, config: Config, device: Device) -> float:
    """Estimated clocks with splits and a second stage."""
    splits = splits_of(problem, config, device)
    sums = config.blocks_of(problem) * config.tile_sums
    return _multiplying(problem, config, splits, device) + SECOND_STAGE + 2 * 4 * splits * sums / MOVED


def _whole(problem: Problem, config: Config, device: Device) -> float:
    """Estimated clocks with one split, stored as the gradient."""
    sums = config.blocks_of(problem) * config.tile_sums
    return _multiplying(problem, config, 1, device) + config.itemsize * sums / MOVED


@lru_cache(maxsize=1024)
def whole_is_faster(problem: Problem, config: Config, device: Device = H200) -> bool:
    """Whether one split, stored as the gradient, takes fewer estimated clocks than several; never beyond
    LONGEST_SUM."""
    _, stages = config.stages_of(problem)
    if stages * config.positions > LONGEST_SUM:
        return False
    alone = splits_of(problem, config, device) == 1
    return alone or _whole(problem, config, device) < _several(problem, config, device)


@lru_cache(maxsize=1024)
def filling_planes(problem: Problem, config: Config, phases: int, device: Device) -> Config:
    """The tile of planes, ``phases`` of a channel, with ``direct`` set where it is faster."""
    direct = grad_weight_direct.planes_suit(problem, config, phases) and whole_is_faster(problem, config, device)
    return replace(config, direct=True, plane_phases=phases) if direct else config


@lru_cache(maxsize=1024)
def filling(problem: Problem, config: Config, device: Device) -> Config:
    """The given tile, or a clearly better one of the other kind (``by_taps``), with ``direct`` set where it is
    faster."""

    def stored(config):
        direct = grad_weight_direct.suits(problem, config) and whole_is_faster(problem, config, device)
        return replace(config, direct=direct)

    def clocks(config):
        return (_whole if config.direct else _several)(problem, config, device)

    own = stored(config)
    others = likely(problem.layer, config.precision, config.alike, not config.by_taps)
    best = min(map(stored, others), key=clocks, default=own)
    return best if clocks(best) < LARGEST_SHARE * clocks(own) else own
