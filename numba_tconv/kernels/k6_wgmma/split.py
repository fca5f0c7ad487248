"""Split-K for k6 (kernels/common/channel_parts.py): the choice between split and whole sums over input channels."""

from __future__ import annotations

from functools import lru_cache

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.channel_parts import LEAST_GAIN, second_stage_ms, split, worthwhile
from numba_tconv.runtime.device import H200, Device

from . import cost as k6_cost
from .tile import Config, configs


def cost(problem: Problem, config: Config, device: Device) -> float:
    """Return the predicted milliseconds, as cost.cost, with the second stage that adds up split sums."""
    first = k6_cost.cost(split(problem, config.splits), config, device)
    return first + second_stage_ms(problem, config.splits, config.tile.itemsize)


def share(problem: Problem, config: Config, device: Device) -> float:
    """Return the share of the multiprocessors that have a tile without a split; above 1, all have one."""
    tiles = config.tile.row_tiles(problem) * problem.groups * k6_cost.column_tiles(problem, config)
    return tiles / (config.regions * device.multiprocessors)


def candidates(problem: Problem, precision: str, share: float = 0.0) -> list[Config]:
    """Return the configurations with split sums; ``share``: of the multiprocessors, filled without a split."""
    return [
        config
        for splits in worthwhile(problem, share)
        for config in configs(split(problem, splits), precision, wide_outputs=True, splits=splits)
    ]


@lru_cache(maxsize=1024)
def choose(problem: Problem, precision: str) -> Config | None:
    """Return the cheapest configuration of a problem, split or whole; None if it has none."""
    whole = k6_cost.choose(problem, precision)
    if whole is None or (filled := share(problem, whole, H200)) >= 1:
        return whole
    best = min(candidates(problem, precision, filled), key=lambda config: cost(problem, config, H200), default=whole)
    return best if cost(problem, best, H200) + LEAST_GAIN < cost(problem, whole, H200) else whole
