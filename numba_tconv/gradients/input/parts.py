"""Split the reduction of the gradient for the input, where few tiles have long sums.

Each of ``splits`` parts of the output channels makes a float32 gradient; kernels/common/partial_sum.py adds them up.
The parts are the gradient of a problem with ``splits`` times as many groups, except that a part's weights are some
columns of its group's."""

from __future__ import annotations

from dataclasses import replace

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common import partial_sum

# Candidates, which must divide the output channels; the fewest channels of a part.
PARTS = 1, 2, 3, 4, 6, 8, 12, 16
FEWEST_CHANNELS = 8


def split(problem: Problem, splits: int) -> Problem:
    """The problem whose gradient for the input, (N, groups, splits, C_in/groups, L), is the parts of ``problem``'s."""
    return replace(problem, in_channels=splits * problem.in_channels, groups=splits * problem.groups)


def summed(problem: Problem) -> Problem:
    """The problem whose output is the gradient, for kernels/common/partial_sum.py."""
    p = problem
    return Problem(p.batch, p.in_channels, p.in_channels, 1, p.length, groups=p.groups)


def numbers_of_parts(problem: Problem) -> list[int]:
    """Numbers of parts in which the output channels of a group may be summed."""
    channels, sums = problem.out_channels_per_group, problem.batch * problem.in_channels * problem.length
    return [
        splits
        for splits in PARTS
        if splits == 1
        or (channels % splits == 0 and channels // splits >= FEWEST_CHANNELS and splits * sums <= partial_sum.MOST_SUMS)
    ]


def second_stage(problem: Problem, dtype: torch.dtype, splits: int, early: bool) -> partial_sum.SecondStage | None:
    """The second stage, which adds up the parts; None for one part."""
    return partial_sum.second_stage(summed(problem), dtype, splits, has_bias=False, early=early)
