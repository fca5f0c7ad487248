"""How tiles of grad_weight_wgmma fill a GPU's multiprocessors: into how many splits the sums go, or whether whole ones
are stored at once, and by which of a few tiles.

Each split's sums go through memory to a second stage. What tiles and splits leave idle in the last round of blocks, and
what the second stage takes, is little of long sums; of short ones it decides. With 64 tiles of any tap instead of 48 of
two, in two splits, hifigan_u1 takes 0.063 ms instead of 0.077 in bfloat16; with 256, whole, instead of 192 in two
splits, oobleck_u2 0.189 instead of 0.242 (H200, rows of 490f28d and 79f8300).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.wgmma_ring import ARRIVING
from numba_tconv.runtime.device import H200, Device

from . import epilogue as grad_weight_direct
from .tile import LARGEST_SHARE, Config, likely

LONGEST_SUM = 1 << 15  # positions of one split: tensor cores cut off what an addition cannot hold
FIRST_STAGES = 4  # of a block, which nothing hides
# Clocks of the second stage's launch, and bytes that it, or a direct store, moves a clock on the whole GPU: of profiles
# of head and small (H200; no recorded rows).
SECOND_STAGE, MOVED = 5000, 1640


@lru_cache(maxsize=1024)
def splits_of(problem: Problem, config: Config, device: Device = H200) -> int:
    """Splits: as many as take the fewest estimated clocks, none longer than sums may be."""
    _, stages = config.stages_of(problem)
    blocks = config.blocks_of(problem)
    # Each split writes its sums and another kernel reads them.
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
    """Estimated clocks of several splits, which a second stage adds up."""
    splits = splits_of(problem, config, device)
    sums = config.blocks_of(problem) * config.tile_sums
    return _multiplying(problem, config, splits, device) + SECOND_STAGE + 2 * 4 * splits * sums / MOVED


def _whole(problem: Problem, config: Config, device: Device) -> float:
    """Estimated clocks of sums that are stored as the gradient."""
    sums = config.blocks_of(problem) * config.tile_sums
    return _multiplying(problem, config, 1, device) + config.itemsize * sums / MOVED


@lru_cache(maxsize=1024)
def whole_is_faster(problem: Problem, config: Config, device: Device = H200) -> bool:
    """Whether sums of one split, stored as the gradient, take fewer estimated clocks than those of several: of short
    signals, whose sums are soon formed."""
    _, stages = config.stages_of(problem)
    if stages * config.positions > LONGEST_SUM:
        return False
    alone = splits_of(problem, config, device) == 1
    return alone or _whole(problem, config, device) < _several(problem, config, device)


@lru_cache(maxsize=1024)
def filling_planes(problem: Problem, config: Config, phases: int, device: Device) -> Config:
    """The tile of planes, ``phases`` of a channel; whether its sums are stored directly."""
    direct = grad_weight_direct.planes_suit(problem, config, phases) and whole_is_faster(problem, config, device)
    return replace(config, direct=True, plane_phases=phases) if direct else config


@lru_cache(maxsize=1024)
def filling(problem: Problem, config: Config, device: Device) -> Config:
    """The tile that is best for long sums, or, where that takes clearly fewer estimated clocks, the best one of the
    other kind (``by_taps``); either way, whether its sums are stored directly."""

    def stored(config):
        direct = grad_weight_direct.suits(problem, config) and whole_is_faster(problem, config, device)
        return replace(config, direct=direct)

    def clocks(config):
        return (_whole if config.direct else _several)(problem, config, device)

    own = stored(config)
    others = likely(problem.layer, config.precision, config.alike, not config.by_taps)
    best = min(map(stored, others), key=clocks, default=own)
    return best if clocks(best) < LARGEST_SHARE * clocks(own) else own
