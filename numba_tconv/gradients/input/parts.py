"""A gradient for the input whose sums over output channels are taken in parts, where few tiles have long sums.

The output channels are dealt out to ``splits`` parts, each of which makes a gradient of its own, in float32;
kernels/common/partial_sum.py adds them up. It is the gradient of a problem with ``splits`` times as many groups, of the
same outputs, but that the weights of a part are some columns of those of its group."""

from __future__ import annotations

from dataclasses import replace

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common import partial_sum

# Numbers of parts that are tried, where they divide the output channels; and the fewest channels of a part.
PARTS = 1, 2, 3, 4, 6, 8, 12, 16
FEWEST_CHANNELS = 8


def split(problem: Problem, splits: int) -> Problem:
    """The problem whose gradient for the input, (N, groups, splits, C_in/groups, L), is the parts of ``problem``'s."""
    return replace(problem, in_channels=splits * problem.in_channels, groups=splits * problem.groups)


def summed(problem: Problem) -> Problem:
    """The problem that has the gradient as its output, as kernels/common/partial_sum.py adds it up."""
    p = problem
    return Problem(p.batch, p.in_channels, p.in_channels, 1, p.length, groups=p.groups)


def numbers_of_parts(problem: Problem) -> list[int]:
    """In how many parts the output channels of a group may be summed."""
    channels, sums = problem.out_channels_per_group, problem.batch * problem.in_channels * problem.length
    return [
        splits
        for splits in PARTS
        if splits == 1
        or (channels % splits == 0 and channels // splits >= FEWEST_CHANNELS and splits * sums <= partial_sum.MOST_SUMS)
    ]


def second_stage(problem: Problem, dtype: torch.dtype, splits: int, early: bool) -> partial_sum.SecondStage | None:
    """What adds up the parts; None for one."""
    return partial_sum.second_stage(summed(problem), dtype, splits, has_bias=False, early=early)
