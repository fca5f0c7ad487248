"""Tiles of grad_input_wgmma whose stages are split into parts, where there are too few to keep a GPU busy.

Each part leaves its sums in float32; partial_sum.py adds them up, in a fixed order.
"""

from __future__ import annotations

from functools import lru_cache

from ..problem import Problem
from . import partial_sum
from .device import Device
from .grad_input_wgmma_config import Config

# Bytes of both directions that a GPU copies in a clock of its multiprocessors (4.29 TB/s on an H200), and clocks that
# one more launch takes, about.
COPYING, LAUNCH_CLOCKS = 2400, 5000
LARGEST_SHARE = 3 / 4  # of the clocks of whole sums: the estimates are no better


@lru_cache(maxsize=1024)
def splits_of(problem: Problem, config: Config, device: Device) -> int:
    """Parts of a tile: as many as take the fewest estimated clocks, all of as many stages; 1 where half of the
    multiprocessors have a tile anyway."""
    p, stages, (_, _, tiles) = problem, config.stages_of(problem), config.tiles(problem)
    sums = p.batch * p.in_channels * p.length
    if 2 * tiles > device.multiprocessors:
        return 1

    def clocks(splits):
        waves = -(-tiles * splits // device.multiprocessors)
        first = waves * (stages // splits * config.stage_clocks + config.storing_clocks)
        added = (2 * 4 * splits + config.itemsize) * sums / COPYING + LAUNCH_CLOCKS
        return first + (added if splits > 1 else 0)

    parts = range(1, min(stages, 2 * device.multiprocessors // tiles, partial_sum.MOST_SUMS // sums) + 1)
    best = min((splits for splits in parts if stages % splits == 0), key=clocks, default=1)
    return best if clocks(best) < LARGEST_SHARE * clocks(1) else 1


def second_stage(problem: Problem, splits: int, config: Config) -> partial_sum.SecondStage:
    """What adds up the parts."""
    p, dtype = problem, config.dtype
    results = Problem(p.batch, p.in_channels, p.in_channels, 1, p.length, groups=p.groups)  # those are its outputs
    launch = partial_sum.prepare(results, dtype, splits, has_bias=False, early=True)
    return partial_sum.SecondStage(partial_sum.partial_sums(results, splits), launch)
