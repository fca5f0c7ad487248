"""How tiles of grad_input_wgmma fill a GPU: by their width, and by split-K.

Blocks take tiles in turn; narrower tiles can fill the last round. Where tiles are too few, parts of their stages become
tiles, whose float32 sums kernels/common/split_sums.py adds up in a fixed order."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.input.parts import summed
from numba_tconv.gradients.wgmma_ring import deepest
from numba_tconv.kernels.common import split_sums
from numba_tconv.runtime.device import Device

from .tile import Config

# Bytes read and written that an H200 copies in a clock; clocks of one more launch, about.
COPYING, LAUNCH_CLOCKS = 2400, 5000
# Shares of the clocks of whole sums, and of the widest tiles, below which others are taken.
LARGEST_SHARE, LARGEST_SHARE_OF_WIDEST = 3 / 4, 0.95


def clocks_of(problem: Problem, config: Config, splits: int, device: Device) -> float:
    """Estimated clocks of the whole gradient, with tiles in ``splits`` parts."""
    p, (_, _, tiles) = problem, config.tiles(problem)
    rounds = -(-tiles * splits // device.multiprocessors)
    if splits == 1:
        return rounds * config.clocks(p)
    first = rounds * (config.stages_of(p) // splits * config.stage_clocks + config.storing_clocks)
    sums = p.batch * p.in_channels * p.length
    return first + (2 * 4 * splits + config.itemsize) * sums / COPYING + LAUNCH_CLOCKS


@lru_cache(maxsize=1024)
def splits_of(problem: Problem, config: Config, device: Device) -> int:
    """Parts of a tile with the fewest estimated clocks, all of equally many stages.

    It is 1 where more than half of the multiprocessors have a tile."""
    p, stages, (_, _, tiles) = problem, config.stages_of(problem), config.tiles(problem)
    sums = p.batch * p.in_channels * p.length
    if 2 * tiles > device.multiprocessors:
        return 1

    def clocks(splits):
        return clocks_of(p, config, splits, device)

    parts = range(1, min(stages, 2 * device.multiprocessors // tiles, split_sums.MOST_SUMS // sums) + 1)
    best = min((splits for splits in parts if stages % splits == 0), key=clocks, default=1)
    return best if clocks(best) < LARGEST_SHARE * clocks(1) else 1


@lru_cache(maxsize=1024)
def filling(problem: Problem, config: Config, device: Device) -> Config:
    """The configuration that fills the GPU: ``config`` or clearly better narrower tiles, with ``partial`` set.

    Narrower means one more tile along the input channels, or twice as many: a layer has three widths at most."""

    def clocks(config):
        return clocks_of(problem, config, splits_of(problem, config, device), device)

    _, across, _ = config.tiles(problem)
    widths = [-(-problem.in_channels_per_group // count // 8) * 8 for count in (across + 1, 2 * across)]
    narrower = (deepest(replace(config, channels=width, stages=0)) for width in widths)
    best = min(filter(None, narrower), key=clocks, default=config)
    if clocks(best) > LARGEST_SHARE_OF_WIDEST * clocks(config):
        best = config
    return replace(best, partial=splits_of(problem, best, device) > 1)


def second_stage(problem: Problem, splits: int, config: Config) -> split_sums.SecondStage:
    """The second stage, which adds up the parts."""
    results = summed(problem)
    launch = split_sums.prepare(results, config.dtype, splits, has_bias=False, early=True)
    return split_sums.SecondStage(split_sums.partial_sums(results, splits), launch)
