"""The second stage of sums that are split over input channels: partial sums added up, always in the same order.

The first stage leaves, of every group of a sample, one partial sum for each split and output; a thread adds up those of
one output, adds the bias and converts. What it reads was written just before, and is mostly still in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from numba import cuda, float32, int32, types, uint32, uint64

from ..elements import ELEMENTS
from ..launch import Kernel, Prepared, alike, flat
from ..layout import room
from ..problem import Problem
from ..ptx import griddepcontrol_wait

THREADS = 128
BATCH = 4  # loads that a thread has under way
MOST_SUMS = 2**31 - 1  # partial sums are counted in 32 bits


@cache
def make_kernel(dtype: torch.dtype, early: bool) -> Kernel:
    """``early``: it can be launched so (Kernel.prepare)."""
    element = ELEMENTS[dtype]
    load, store = element.load, element.store

    def partial_sum(partials, bias, has_bias, y, splits, groups, group_outputs, out_length):
        if early:
            griddepcontrol_wait()
        e = int32(cuda.grid(1))
        if e >= y.size:
            return
        splits, group_outputs = int32(splits), int32(group_outputs)
        group = int32(uint32(e) // uint32(group_outputs))  # of all samples
        at = int32(e + group * (splits - 1) * group_outputs)
        values = cuda.local.array(BATCH, dtype=float32)
        total = float32(0)
        if has_bias:
            channel = int32(uint32(e) // uint32(out_length))  # of all samples
            total = float32(load(bias[uint64(uint32(channel) % uint32(bias.size))]))
        first = int32(0)
        while first < splits:
            for z in range(BATCH):
                there = int32(min(first + z, splits - 1))
                values[z] = partials[uint64(int32(at + there * group_outputs))]
            for z in range(BATCH):
                if first + z < splits:
                    total += values[z]
            first = int32(first + BATCH)
        y[uint64(e)] = store(total)

    signature = (flat(float32), *[flat(element.storage), types.int64] * 2, *(types.int64,) * 3)
    return Kernel("partial_sum", partial_sum, signature, THREADS, key=f"{dtype} {early}")


def kernels_of(config, dtype: torch.dtype) -> list[Kernel]:
    """The kernel that adds up the partial sums of a rung's configuration, if it leaves any."""
    return [make_kernel(dtype, getattr(config, "early_sums", False))] if getattr(config, "splits", 1) > 1 else []


def partial_sums(problem: Problem, splits: int) -> int:
    """How many there are."""
    return splits * problem.batch * problem.out_channels * problem.out_length


def prepare(problem: Problem, dtype: torch.dtype, splits: int, has_bias: bool, early: bool = False) -> Prepared:
    """The launch that fills the output from the partial sums (N, groups, splits, C_out/groups, L_out) in float32: it
    takes them, the bias (C_out,) or, without one, anything of ``dtype``, and the output (N, C_out, L_out) of ``dtype``.
    """
    p = problem
    outputs = p.batch * p.out_channels * p.out_length
    return make_kernel(dtype, early).prepare(
        -(-outputs // THREADS),
        *(alike((splits * outputs,), torch.float32), alike((p.out_channels,), dtype), int(has_bias)),
        *(alike((p.batch, p.out_channels, p.out_length), dtype), splits, p.groups),
        *(p.out_channels_per_group * p.out_length, p.out_length),
        early=early,
    )


@dataclass(frozen=True)
class SecondStage:
    """What adds up ``sums`` partial sums of a launch."""

    sums: int
    launch: Prepared

    def after(self, first: Callable, index: int) -> Callable:
        """The launch ``first`` of (x, packed, bias, y), which leaves the partial sums, and then this one, on the GPU of
        ``index``."""
        sums_room, add_up = room((self.sums,), torch.float32, index), self.launch

        def both(x, packed, bias, y):
            partials = sums_room()
            first(x, packed, packed, partials)
            add_up(partials, bias, y)

        return both


def second_stage(
    problem: Problem, dtype: torch.dtype, splits: int, has_bias: bool, early: bool = False
) -> SecondStage | None:
    """That of sums in ``splits`` parts; None for one."""
    if splits == 1:
        return None
    return SecondStage(partial_sums(problem, splits), prepare(problem, dtype, splits, has_bias, early))
