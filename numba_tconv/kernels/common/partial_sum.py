"""The second stage of split-K: adds up partial sums, always in the same order, adds the bias and converts.

A thread adds up the partial sums of four neighbouring outputs, or of one where a group's outputs are no multiple of
four.
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
VECTOR = 4  # outputs of a thread: their partial sums are 16 bytes
BATCH = 4  # parts whose loads a thread has in flight
MOST_SUMS = 2**31 - 1  # partial sums are counted in 32 bits


@device_function
def _load_one(values, z, partials, at):
    values[z] = partials[uint64(at)]


def make_add_up(element: Element, width: int):
    """A device function that adds up ``width`` neighbouring outputs of a group, from output ``e`` of all on.

    ``totals``: receives bias plus sums, in float32. ``at``: index of the first partial sum; ``parts_apart``: distance
    of two parts. ``values``: a local array of BATCH * ``width``.
    """
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
            first = recomputed(int32(first + BATCH))  # keeps the loop from being unrolled

    return add_up


@cache
def make_kernel(dtype: torch.dtype, early: bool) -> Kernel:
    """The kernel for outputs of ``dtype``. ``early``: it can be launched early (Kernel.prepare)."""
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
        else:  # y may begin anywhere; the partial sums are aligned
            for u in range(VECTOR):
                y[uint64(e + u)] = store(totals[u])

    signature = (flat(float32), *[flat(element.storage), types.int64] * 2, *(types.int64,) * 3)
    return Kernel("partial_sum", partial_sum, signature, THREADS, key=f"{dtype} {early}")


def kernels_of(config, dtype: torch.dtype, device: Device | None = None) -> list[Kernel]:
    """The second-stage kernel of a configuration, as a list; empty without a split. ``early_sums`` of the configuration
    says whether it is launched early, else ``device``.
    """
    if getattr(config, "splits", 1) == 1:
        return []
    return [make_kernel(dtype, getattr(config, "early_sums", device is not None and device.launches_early))]


def partial_sums(problem: Problem, splits: int) -> int:
    """The number of partial sums."""
    return splits * problem.batch * problem.out_channels * problem.out_length


def prepare(problem: Problem, dtype: torch.dtype, splits: int, has_bias: bool, early: bool = False) -> Prepared:
    """The launch that adds up partial sums.

    It takes the partial sums (N, groups, splits, C_out/groups, L_out), float32 and aligned, the bias (C_out,) or any
    tensor of ``dtype``, and the output (N, C_out, L_out) of ``dtype``, which may begin anywhere.
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
    """The launch that adds up ``sums`` partial sums."""

    sums: int
    launch: Prepared

    def after(self, first: Callable, index: int) -> Callable:
        """A function of (x, w, bias, y) that runs ``first``, then this launch on its partial sums, on GPU ``index``."""
        sums_room, add_up = room((self.sums,), torch.float32, index), self.launch

        def both(x, w, bias, y):
            partials = sums_room()
            first(x, w, w, partials)
            add_up(partials, bias, y)

        return both


def second_stage(
    problem: Problem, dtype: torch.dtype, splits: int, has_bias: bool, early: bool = False
) -> SecondStage | None:
    """The second stage for sums in ``splits`` parts; None for one part."""
    if splits == 1:
        return None
    return SecondStage(partial_sums(problem, splits), prepare(problem, dtype, splits, has_bias, early))
