"""The second stage of sums that are split over input channels: partial sums added up, always in the same order.

The first stage leaves, of every group of a sample, one partial sum for each split and output; a thread adds up those of
four neighbouring outputs, adds the bias and converts. What it reads was written just before, and is mostly still in the
L2 cache. Where a group's outputs are no whole number of fours, a thread takes one output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from numba import cuda, float32, int32, types, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.ptx import device_function, global_address, griddepcontrol_wait, load_vector, recomputed, store_run
from numba_tconv.runtime.device import Device
from numba_tconv.runtime.elements import ELEMENTS, Element
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat
from numba_tconv.runtime.layout import room

THREADS = 128
VECTOR = 4  # outputs of a thread, whose partial sums are 16 bytes
BATCH = 4  # parts whose loads a thread has under way
MOST_SUMS = 2**31 - 1  # partial sums are counted in 32 bits


@device_function
def _load_one(values, z, partials, at):
    values[z] = partials[uint64(at)]


def make_add_up(element: Element, width: int):
    """A device function for ``width`` neighbouring outputs of a group, from output ``e`` of all on: ``totals`` of their
    partial sums, which are ``parts_apart`` from one part to the next, the first part's from ``at`` on."""
    load, load_partials = element.load, _load_one if width == 1 else load_vector

    @device_function
    def add_up(totals, values, partials, at, splits, parts_apart, bias, has_bias, e, out_length):
        for u in range(width):
            totals[u] = float32(0)
        if has_bias:
            channel = int32(uint32(e) // uint32(out_length))  # of all samples
            own, end = int32(uint32(channel) % uint32(bias.size)), int32((channel + 1) * out_length - e)
            for u in range(width):
                if u == end:
                    own, end = int32(own + 1), int32(end + out_length)
                totals[u] = float32(load(bias[uint64(own)]))
        first = int32(0)
        while first < splits:
            for z in range(BATCH):
                there = int32(min(int32(first + z), int32(splits - 1)))
                load_partials(values, z * width, partials, int32(at + there * parts_apart))
            for z in range(BATCH):
                if int32(first + z) < splits:
                    for u in range(width):
                        totals[u] += values[z * width + u]
            first = recomputed(int32(first + BATCH))  # not worth unrolling further

    return add_up


@cache
def make_kernel(dtype: torch.dtype, early: bool) -> Kernel:
    """``early``: it can be launched so (Kernel.prepare)."""
    element = ELEMENTS[dtype]
    store, store_vector, vector_bytes = element.store, store_run(element, VECTOR), VECTOR * dtype.itemsize
    add_up_one, add_up_vector, all_values = make_add_up(element, 1), make_add_up(element, VECTOR), BATCH * VECTOR

    def partial_sum(partials, bias, has_bias, y, splits, group_outputs, out_length, width):
        e = int32(cuda.grid(1) * width)
        splits, group_outputs, out_length = int32(splits), int32(group_outputs), int32(out_length)
        group = int32(uint32(e) // uint32(group_outputs))  # of all samples
        at = int32(e + group * (splits - 1) * group_outputs)
        values, totals = cuda.local.array(all_values, dtype=float32), cuda.local.array(VECTOR, dtype=float32)
        if early:
            griddepcontrol_wait()
        if e >= y.size:
            return
        if width == 1:
            add_up_one(totals, values, partials, at, splits, group_outputs, bias, has_bias, e, out_length)
            y[uint64(e)] = store(totals[0])
            return
        add_up_vector(totals, values, partials, at, splits, group_outputs, bias, has_bias, e, out_length)
        if global_address(y, e) % vector_bytes == 0:
            store_vector(y, e, totals, 0)
        else:  # y begins anywhere, the partial sums, in memory of their own, do not
            for u in range(VECTOR):
                y[uint64(e + u)] = store(totals[u])

    signature = (flat(float32), *[flat(element.storage), types.int64] * 2, *(types.int64,) * 3)
    return Kernel("partial_sum", partial_sum, signature, THREADS, key=f"{dtype} {early}")


def kernels_of(config, dtype: torch.dtype, device: Device | None = None) -> list[Kernel]:
    """The kernel that adds up the partial sums of a rung's configuration, if it leaves any. Whether it is launched
    early, the configuration says, or else ``device``."""
    if getattr(config, "splits", 1) == 1:
        return []
    return [make_kernel(dtype, getattr(config, "early_sums", device is not None and device.launches_early))]


def partial_sums(problem: Problem, splits: int) -> int:
    """How many there are."""
    return splits * problem.batch * problem.out_channels * problem.out_length


def prepare(problem: Problem, dtype: torch.dtype, splits: int, has_bias: bool, early: bool = False) -> Prepared:
    """The launch that fills the output from the partial sums (N, groups, splits, C_out/groups, L_out) in float32: it
    takes them, as torch allocates them, the bias (C_out,) or, without one, anything of ``dtype``, and the output
    (N, C_out, L_out) of ``dtype``, which may begin anywhere.
    """
    p = problem
    outputs, group_outputs = p.batch * p.out_channels * p.out_length, p.out_channels_per_group * p.out_length
    width = VECTOR if group_outputs % VECTOR == 0 else 1  # outputs of a thread
    return make_kernel(dtype, early).prepare(
        -(-outputs // (width * THREADS)),
        *(alike((splits * outputs,), torch.float32), alike((p.out_channels,), dtype), int(has_bias)),
        *(alike((p.batch, p.out_channels, p.out_length), dtype), splits, group_outputs, p.out_length, width),
        early=early,
    )


@dataclass(frozen=True)
class SecondStage:
    """What adds up ``sums`` partial sums of a launch."""

    sums: int
    launch: Prepared

    def after(self, first: Callable, index: int) -> Callable:
        """What ``first`` does of (x, w, bias, y), which leaves the partial sums, and then this launch, on the GPU of
        ``index``."""
        sums_room, add_up = room((self.sums,), torch.float32, index), self.launch

        def both(x, w, bias, y):
            partials = sums_room()
            first(x, w, w, partials)
            add_up(partials, bias, y)

        return both


def second_stage(
    problem: Problem, dtype: torch.dtype, splits: int, has_bias: bool, early: bool = False
) -> SecondStage | None:
    """That of sums in ``splits`` parts; None for one."""
    if splits == 1:
        return None
    return SecondStage(partial_sums(problem, splits), prepare(problem, dtype, splits, has_bias, early))
