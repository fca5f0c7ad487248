"""What k4 launches for tensors that are laid out alike, worked out once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from numba import types

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.channel_parts import split
from numba_tconv.kernels.common.partial_sum import SecondStage, second_stage
from numba_tconv.runtime.device import Device
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat
from numba_tconv.runtime.layout import Layout

from . import cost as k4_cost
from .pack import TilePacking, packing_of
from .tile import Config

GRID_AXIS = 65_535  # blocks along y or z of a grid, at most


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
    """How the weights are packed, the launch that computes, and what adds up its partial sums, if it leaves any.
    ``choose``: which configuration, where none is given. ``y_aligned``: the output begins at a multiple of 16 bytes; a
    given ``config`` decides itself what it stores."""
    given, config = config, config or choose(x, problem, device)
    # k4 does not say when the next kernel may begin: its blocks do when the last of k4's has ended, so that they do not
    # gather on the multiprocessors that are free first (kernels/k6_wgmma/tail.py), however many they are. Only their
    # launch is early.
    second = second_stage(problem, x.dtype, config.splits, has_bias, device.launches_early)
    if second:
        has_bias, y_aligned = False, True  # of what torch's allocator gives
    if not (given or y_aligned):
        config = replace(config, y_vector=1)
    p = split(problem, config.splits)
    t = p.taps
    first_column, columns = config.columns(p)
    row_tiles, column_tiles = config.row_tiles(p), -(-p.batch * columns // config.block_n)
    planes, packing = -(-column_tiles // GRID_AXIS), packing_of(p, config, w)
    packed = alike((packing.size,), w.dtype)
    grid, kernel = (row_tiles * p.groups, -(-column_tiles // planes), planes), make_kernel(replace(config, splits=1))
    launch = kernel.prepare(
        grid,
        *(alike(x.shape, x.dtype, x.strides), *x.strides, packed),
        *(alike((p.out_channels,), x.dtype) if has_bias else packed, has_bias),
        alike((p.batch, p.out_channels, p.out_length), x.dtype),
        *(p.batch, p.length, p.out_length, p.in_channels_per_group, p.out_channels_per_group, p.groups, p.padding),
        *(columns, first_column, row_tiles, config.tap_chunks(p), config.channel_chunks(p)),
        t.kernel_size - (t.taps_per_row - 1) * t.rows,
        early=device.spreads_early(math.prod(grid), kernel.shared_bytes, packing.blocks),
    )
    return packing, launch, second


def kernel_of(name: str, function: Callable, config: Config, threads: int) -> Kernel:
    """That of a function of what ``plan_of`` prepares a launch with."""
    stored, integers = flat(ELEMENTS[config.dtype].storage), (types.int64,)
    signature = (stored, *integers * 3, stored, stored, *integers, stored, *integers * 13)
    return Kernel(name, function, signature, threads, config.shared_bytes, config.min_blocks, key=repr(config))


def config_for(x: Layout, problem: Problem, device: Device) -> Config:
    return k4_cost.choose(problem, x.dtype, vector_of(x), device)


def vector_of(x: Layout) -> int:
    """Elements of the largest vectors, of 16 or 8 bytes, of an input (N, C_in, L) that are aligned, and of which each
    lies inside the signal or outside; 1 if there are none."""
    return next((v for v in (4, 2) if v * x.dtype.itemsize in (8, 16) and vectors_align(x, v)), 1)


def vectors_align(x: Layout, v: int) -> bool:
    """Whether that is so of vectors of ``v`` elements."""
    contiguous_rows = x.strides[2] == 1 and x.strides[0] % v == 0 and x.strides[1] % v == 0
    return contiguous_rows and x.shape[2] % v == 0 and x.offset % (v * x.dtype.itemsize) == 0
