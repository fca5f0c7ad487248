"""Sums of k6 that are split over input channels: for problems with fewer tiles than a GPU has multiprocessors.

A short signal with many channels has few tiles, each a long sum. Then the input channels are dealt out to ``splits``
parts, and every tile is computed that many times, each time of one part. Torch's order of the weights makes this the
grouped problem on the same tensors: with ``splits`` times as many groups, every group has the outputs of all. What it
computes are partial sums in float32, which partial_sum.py adds up.

That costs a second launch and the partial sums' way through the L2 cache; the model below weighs it against what is
gained. Its constants were fitted to a script's measurements (H200; no recorded rows).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..problem import Problem
from . import k6_cost
from .device import H200, Device
from .k6_config import Config, configs
from .partial_sum import MOST_SUMS

# Numbers of parts that are tried, or the next ones that divide the channels: each has its own order of packed weights.
PARTS = 2, 3, 4, 6, 8, 12, 16
FEWEST_CHANNELS = 16  # of a part
SECOND_LAUNCH = 0.0031  # ms
SUM_BANDWIDTH = 1.64e9  # bytes a millisecond, of partial sums and outputs
LEAST_GAIN = 0.0015  # ms, that the model must promise: about its error


def split(problem: Problem, splits: int) -> Problem:
    """The problem whose outputs (N, groups, splits, C_out/groups, L_out) are the partial sums of ``problem``."""
    if splits == 1:
        return problem
    return replace(problem, out_channels=splits * problem.out_channels, groups=splits * problem.groups, bias=False)


def partial_sums(problem: Problem, splits: int) -> int:
    return splits * problem.batch * problem.out_channels * problem.out_length


def cost(problem: Problem, config: Config, device: Device) -> float:
    """Milliseconds, but for what every launch costs: as k6_cost.cost, of split sums too."""
    first = k6_cost.cost(split(problem, config.splits), config, device)
    if config.splits == 1:
        return first
    moved = 4 * partial_sums(problem, config.splits) + config.tile.itemsize * partial_sums(problem, 1)
    return first + SECOND_LAUNCH + moved / SUM_BANDWIDTH


def numbers_of_parts(problem: Problem) -> list[int]:
    """In how many parts the channels of a group may be summed, beside one."""
    channels = problem.in_channels_per_group
    divisors = [d for d in range(2, channels // FEWEST_CHANNELS + 1) if channels % d == 0]
    nearest = (next((d for d in divisors if d >= parts), 1) for parts in PARTS)
    fitting = (d for d in nearest if d > 1 and partial_sums(problem, d) <= MOST_SUMS)
    return list(dict.fromkeys(fitting))


def share(problem: Problem, config: Config, device: Device) -> float:
    """Of the multiprocessors, those that have a tile without a split; above 1, every one has."""
    tiles = config.tile.row_tiles(problem) * problem.groups * k6_cost.column_tiles(problem, config)
    return tiles / (config.regions * device.multiprocessors)


def candidates(problem: Problem, precision: str, share: float = 0.0) -> list[Config]:
    """The configurations of split sums, in no more parts than have two tiles for each multiprocessor, of which one part
    fills ``share``."""
    parts = numbers_of_parts(problem)
    enough = next((z for z, splits in enumerate(parts) if splits * share >= 2), len(parts))
    return [
        replace(config, splits=splits)
        for splits in parts[: enough + 1]
        for config in configs(split(problem, splits), precision, wide_outputs=True)
    ]


@lru_cache(maxsize=1024)
def choose(problem: Problem, precision: str) -> Config | None:
    """The configuration of a problem; None if it has none."""
    whole = k6_cost.choose(problem, precision)
    if whole is None or (filled := share(problem, whole, H200)) >= 1:
        return whole
    best = min(candidates(problem, precision, filled), key=lambda config: cost(problem, config, H200), default=whole)
    return best if cost(problem, best, H200) + LEAST_GAIN < cost(problem, whole, H200) else whole
