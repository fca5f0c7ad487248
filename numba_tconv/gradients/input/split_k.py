"""Split-K over output channels, for few tiles with long sums (kernels/common/split_sums.py).

Splits are like groups, but share one group's weights by columns."""

from dataclasses import replace

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common import split_sums

PARTS = 1, 2, 3, 4, 6, 8, 12, 16  # those that divide the output channels
FEWEST_CHANNELS = 8


def split(problem: Problem, splits: int) -> Problem:
    """The problem whose gradient is the partial sums (N, groups, splits, C_in/groups, L)."""
    return replace(problem, in_channels=splits * problem.in_channels, groups=splits * problem.groups)


def summed(problem: Problem) -> Problem:
    """The problem whose output is the gradient."""
    p = problem
    return Problem(p.batch, p.in_channels, p.in_channels, 1, p.length, groups=p.groups)


def numbers_of_parts(problem: Problem) -> list[int]:
    channels, sums = problem.out_channels_per_group, problem.batch * problem.in_channels * problem.length
    return [
        splits
        for splits in PARTS
        if splits == 1
        or (channels % splits == 0 and channels // splits >= FEWEST_CHANNELS and splits * sums <= split_sums.MOST_SUMS)
    ]


def second_stage(problem: Problem, dtype: torch.dtype, splits: int, early: bool) -> split_sums.SecondStage | None:
    return split_sums.second_stage(summed(problem), dtype, splits, has_bias=False, early=early)
