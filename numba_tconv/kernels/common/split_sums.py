"""Split-K over input channels, for too few tiles to fill a GPU.

The split is a grouped problem on the same tensors; its float32 outputs are partial sums. A second kernel adds them and
the bias in a fixed order, and converts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from numba import cuda, float32, int32, types, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.rung import Step
from numba_tconv.ptx import device_function, global_address, griddepcontrol_wait, load_vector, recomputed, store_run
from numba_tconv.runtime.elements import ELEMENTS, Element
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat
from numba_tconv.runtime.layout import room

from .arguments import Bias, arguments

# Parts to try, rounded up to divisors of a group's channels.
PARTS = 2, 3, 4, 6, 8, 12, 16
FEWEST_CHANNELS = 16
SECOND_LAUNCH = 0.0031  # ms
SUM_BANDWIDTH = 1.64e9  # bytes a millisecond
LEAST_GAIN = 0.0015  # ms, the cost model's error
THREADS = 128
VECTOR = 4
BATCH = 4  # parts in flight
MOST_SUMS = 2**31 - 1  # their indices have 32 bits


@lru_cache(maxsize=1024)
def split(problem: Problem, splits: int) -> Problem:
    """The problem of the partial sums (N, groups, splits, C_out/groups, L_out)."""
    if splits == 1:
        return problem
    return replace(problem, out_channels=splits * problem.out_channels, groups=splits * problem.groups, bias=False)


def second_stage_ms(problem: Problem, splits: int, itemsize: int) -> float:
    """An estimate; outputs have ``itemsize`` bytes."""
    if splits == 1:
        return 0.0
    moved = 4 * partial_sums(problem, splits) + itemsize * partial_sums(problem, 1)
    return SECOND_LAUNCH + moved / SUM_BANDWIDTH


def numbers_of_parts(problem: Problem) -> list[int]:
    channels = problem.in_channels_per_group
    nearest = (next((d for d in range(parts, 2 * parts + 1) if channels % d == 0), channels) for parts in PARTS)
    fitting = (d for d in nearest if channels // d >= FEWEST_CHANNELS and partial_sums(problem, d) <= MOST_SUMS)
    return list(dict.fromkeys(fitting))


def worthwhile(problem: Problem, share: float, rounds: int = 2) -> list[int]:
    """Parts up to the first number that fills the GPU ``rounds`` times; one part fills ``share``."""
    parts = numbers_of_parts(problem)
    enough = next((z for z, splits in enumerate(parts) if splits * share >= rounds), len(parts))
    return parts[: enough + 1]


def partial_sums(problem: Problem, splits: int) -> int:
    return splits * problem.batch * problem.out_channels * problem.out_length


class Parts(NamedTuple):
    sums: object
    splits: int
    group_outputs: int  # C_out/groups * L_out


@device_function
def _load_one(values, z, sums, index):
    values[z] = sums[uint64(index)]


def make_add_up(element: Element, width: int):
    """Build ``add_up``: sums ``width`` neighbouring outputs of a group from output ``e`` of all on.

    ``totals`` receives bias and parts in float32. ``first_sum``: index of e's sum in the first part. ``values``: room
    for ``BATCH * width`` sums."""
    load, load_sums = element.load, _load_one if width == 1 else load_vector

    @device_function
    def add_up(totals, values, parts, first_sum, bias, e, out_length):
        for u in range(width):
            totals[u] = float32(0)
        if bias.exists:
            channel = int32(uint32(e) // uint32(out_length))  # of all samples
            co, end = int32(uint32(channel) % uint32(bias.data.size)), int32((channel + 1) * out_length - e)
            for u in range(width):
                if u == end:
                    co, end = int32(co + 1), int32(end + out_length)
                totals[u] = float32(load(bias.data[uint64(co)]))
        first_part = int32(0)
        while first_part < parts.splits:
            for z in range(BATCH):
                part = int32(min(int32(first_part + z), int32(parts.splits - 1)))
                load_sums(values, z * width, parts.sums, int32(first_sum + part * parts.group_outputs))
            for z in range(BATCH):
                if int32(first_part + z) < parts.splits:
                    for u in range(width):
                        totals[u] += values[z * width + u]
            first_part = recomputed(int32(first_part + BATCH))  # no unrolling

    return add_up


@cache
def make_kernel(dtype: torch.dtype, early: bool) -> Kernel:
    element = ELEMENTS[dtype]
    store, store_vector, vector_bytes = element.store, store_run(element, VECTOR), VECTOR * dtype.itemsize
    add_up_one, add_up_vector, all_values = make_add_up(element, 1), make_add_up(element, VECTOR), BATCH * VECTOR

    def partial_sum(partials, bias, y, splits, group_outputs, out_length, width):
        e = int32(cuda.grid(1) * width)
        parts, out_length = Parts(partials, int32(splits), int32(group_outputs)), int32(out_length)
        group = int32(uint32(e) // uint32(parts.group_outputs))
        first_sum = int32(e + group * (parts.splits - 1) * parts.group_outputs)
        values, totals = cuda.local.array(all_values, dtype=float32), cuda.local.array(VECTOR, dtype=float32)
        if early:
            griddepcontrol_wait()
        if e >= y.size:
            return
        if width == 1:
            add_up_one(totals, values, parts, first_sum, bias, e, out_length)
            y[uint64(e)] = store(totals[0])
            return
        add_up_vector(totals, values, parts, first_sum, bias, e, out_length)
        if global_address(y, e) % vector_bytes == 0:
            store_vector(y, e, totals, 0)
        else:
            for u in range(VECTOR):
                y[uint64(e + u)] = store(totals[u])

    stored = flat(element.storage)
    signature = (flat(float32), arguments(Bias, data=stored), stored, *(types.int64,) * 4)
    return Kernel("partial_sum", partial_sum, signature, THREADS, key=f"{dtype} {early}")


def steps(splits: int, dtype: torch.dtype, early: bool) -> list[Step]:
    return [] if splits == 1 else [Step("add up", make_kernel(dtype, early))]


def prepare(problem: Problem, dtype: torch.dtype, splits: int, has_bias: bool, early: bool = False) -> Prepared:
    """A launch of (partial sums, bias, y).

    Sums (N, groups, splits, C_out/groups, L_out) are aligned float32; bias is (C_out,), for none any tensor of
    ``dtype``; y (N, C_out, L_out) may begin anywhere."""
    p = problem
    outputs, group_outputs = p.batch * p.out_channels * p.out_length, p.out_channels_per_group * p.out_length
    width = VECTOR if group_outputs % VECTOR == 0 else 1
    return make_kernel(dtype, early).prepare(
        -(-outputs // (width * THREADS)),
        alike((splits * outputs,), torch.float32),
        Bias(alike((p.out_channels,), dtype), has_bias),
        *(alike(p.out_shape, dtype), splits, group_outputs, p.out_length, width),
        early=early,
    )


@dataclass(frozen=True)
class SecondStage:
    """The launch that adds up ``sums`` partial sums: (partial sums, bias, y)."""

    sums: int
    launch: Prepared

    def after(self, first: Callable, index: int) -> Callable:
        """A function (x, w, bias, y): ``first`` computes partial sums, then they are added up, on GPU ``index``."""
        sums_room, add_up = room((self.sums,), torch.float32, index), self.launch

        def both(x, w, bias, y):
            partials = sums_room()
            first(x, w, w, partials)
            add_up(partials, bias, y)

        return both


def second_stage(
    problem: Problem, dtype: torch.dtype, splits: int, has_bias: bool, early: bool = False
) -> SecondStage | None:
    if splits == 1:
        return None
    return SecondStage(partial_sums(problem, splits), prepare(problem, dtype, splits, has_bias, early))
