"""Split-K over input channels, for problems with too few tiles to fill a GPU evenly.

Torch's order of weights makes the split a grouped problem on the same tensors, with ``splits`` times as many groups.
Its float32 outputs are partial sums, which partial_sum.py adds up.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from numba_tconv.formula.problem import Problem

from .partial_sum import MOST_SUMS, partial_sums

# Numbers of parts that are tried, each rounded up, at most to its double, to a divisor of the channels.
PARTS = 2, 3, 4, 6, 8, 12, 16
FEWEST_CHANNELS = 16  # input channels of a part
# Cost of the second stage, fitted to measured launches.
SECOND_LAUNCH = 0.0031  # ms
SUM_BANDWIDTH = 1.64e9  # bytes of partial sums and outputs in a millisecond
LEAST_GAIN = 0.0015  # ms that a model must promise: about its error


@lru_cache(maxsize=1024)
def split(problem: Problem, splits: int) -> Problem:
    """The problem whose outputs (N, groups, splits, C_out/groups, L_out) are the partial sums of ``problem``."""
    if splits == 1:
        return problem
    return replace(problem, out_channels=splits * problem.out_channels, groups=splits * problem.groups, bias=False)


def second_stage_ms(problem: Problem, splits: int, itemsize: int) -> float:
    """Estimated milliseconds of the second stage for outputs of ``itemsize`` bytes; 0 without a split."""
    if splits == 1:
        return 0.0
    moved = 4 * partial_sums(problem, splits) + itemsize * partial_sums(problem, 1)
    return SECOND_LAUNCH + moved / SUM_BANDWIDTH


def numbers_of_parts(problem: Problem) -> list[int]:
    """Into how many parts the channels of a group may be split, besides one."""
    channels = problem.in_channels_per_group
    nearest = (next((d for d in range(parts, 2 * parts + 1) if channels % d == 0), channels) for parts in PARTS)
    fitting = (d for d in nearest if channels // d >= FEWEST_CHANNELS and partial_sums(problem, d) <= MOST_SUMS)
    return list(dict.fromkeys(fitting))


def worthwhile(problem: Problem, share: float, rounds: int = 2) -> list[int]:
    """The numbers of parts up to the first whose tiles fill the GPU ``rounds`` times; one part fills ``share`` of
    it.
    """
    parts = numbers_of_parts(problem)
    enough = next((z for z, splits in enumerate(parts) if splits * share >= rounds), len(parts))
    return parts[: enough + 1]
