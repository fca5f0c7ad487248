"""Plans launches for tensors laid out alike."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.arguments import Bias, Signal, arguments, of_problem, over_planes, signal_like
from numba_tconv.kernels.common.split_sums import SecondStage, second_stage, split
from numba_tconv.runtime.device import Device
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat
from numba_tconv.runtime.layout import Layout

from . import choose as k4_choose
from .arguments import Grid, Sizes
from .pack import TilePacking, packing_of
from .tile import Config


@lru_cache(maxsize=1024)
def plan_of(
    make_kernel: Callable[[Config], Kernel],
    choose: Callable[[Layout, Problem, Device], Config],
    problem: Problem,
    config: Config | None,
    x: Layout,
    w: Layout,
    has_bias: bool,
    y_aligned: bool,
    device: Device,
) -> tuple[TilePacking, Prepared, SecondStage | None]:
    """The packing, the launch, split-K's second stage or None.

    Without ``config`` one is chosen; it stores single elements unless y is 16-byte aligned (``y_aligned``)."""
    given, config = config, config or choose(x, problem, device)
    second = second_stage(problem, x.dtype, config.splits, has_bias, device.launches_early)
    if second:
        has_bias, y_aligned = False, True
    if not (given or y_aligned):
        config = replace(config, y_vector=1)
    p = split(problem, config.splits)
    t = p.taps
    first_column, columns = config.columns(p)
    row_tiles, column_tiles = config.row_tiles(p), -(-p.batch * columns // config.block_n)
    packing = packing_of(p, config, w)
    packed = alike((packing.size,), w.dtype)
    grid, kernel = over_planes(row_tiles * p.groups, column_tiles), make_kernel(replace(config, splits=1))
    launch = kernel.prepare(
        grid,
        signal_like(x),
        packed,
        Bias(alike((p.out_channels,), x.dtype) if has_bias else packed, has_bias),
        alike(p.out_shape, x.dtype),
        of_problem(Sizes, p),
        Grid(
            columns=columns,
            first_column=first_column,
            row_tiles=row_tiles,
            tap_chunks=config.tap_chunks(p),
            channel_chunks=config.channel_chunks(p),
            full_phases=t.kernel_size - (t.taps_per_row - 1) * t.rows,
        ),
        # Else early blocks gather on few multiprocessors.
        early=device.spreads_early(math.prod(grid), kernel.shared_bytes, packing.blocks),
    )
    return packing, launch, second


def kernel_of(name: str, function: Callable, config: Config, threads: int) -> Kernel:
    stored = flat(ELEMENTS[config.dtype].storage)
    x, bias = arguments(Signal, data=stored), arguments(Bias, data=stored)
    signature = (x, stored, bias, stored, arguments(Sizes), arguments(Grid))
    return Kernel(name, function, signature, threads, config.shared_bytes, config.min_blocks, key=repr(config))


def config_for(x: Layout, problem: Problem, device: Device) -> Config:
    return k4_choose.choose(problem, x.dtype, vector_of(x), device)


def vector_of(x: Layout) -> int:
    """Elements of the largest vector (16 or 8 bytes) aligned in x (N, C_in, L), wholly inside or outside; or 1."""
    return next((v for v in (4, 2) if v * x.dtype.itemsize in (8, 16) and vectors_align(x, v)), 1)


def vectors_align(x: Layout, v: int) -> bool:
    contiguous_rows = x.strides[2] == 1 and x.strides[0] % v == 0 and x.strides[1] % v == 0
    return contiguous_rows and x.shape[2] % v == 0 and x.offset % (v * x.dtype.itemsize) == 0
