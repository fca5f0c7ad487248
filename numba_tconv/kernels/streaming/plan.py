"""Turns the layouts of a step's tensors into kernel and launch."""

from collections.abc import Callable

import torch

from numba_tconv.formula.precision import TF32_ALLOWED
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.arguments import Bias, of_problem, signal_like, weights_like
from numba_tconv.kernels.rung import Step
from numba_tconv.runtime import device
from numba_tconv.runtime.kernel import Prepared, alike
from numba_tconv.runtime.layout import Layout

from . import depthwise, mma_kernel, mma_tile, tickets, tile
from .arguments import Mask, MmaSizes, Sizes
from .kernel import make_kernel

AnyConfig = tile.Config | mma_tile.Config | depthwise.Config


def choose(
    x: Layout, state: Layout, weight: Layout, problem: Problem, precision: str, gpu: device.Device | None = None
) -> AnyConfig | None:
    """The tile of a step of ``problem.length`` new frames in ``problem.batch`` slots; None if none computes it."""
    p, dtype, limit = problem, x.dtype, (gpu or device.of(x.index)).shared_per_block
    if depthwise.refusal(p) is None:
        return depthwise.choose(p, dtype)
    if _mma_refusal(x, state, weight, p, precision, limit) is None:
        return mma_tile.choose(p, dtype, limit)
    return tile.choose(p, dtype) if tile.refusal(p, dtype) is None else None


def _mma_refusal(x: Layout, state: Layout, weight: Layout, problem: Problem, precision: str, limit: int) -> str | None:
    p, vector = problem, mma_tile.VECTOR // x.dtype.itemsize
    precision = "tf32" if precision == TF32_ALLOWED else precision
    if reason := mma_tile.refusal(p, x.dtype, precision, limit):
        return reason
    if any(one.offset % mma_tile.VECTOR for one in (x, state, weight)):
        return "it takes tensors at multiples of 16 bytes"
    adjacent = p.length, 1 if p.length > 1 else x.strides[2]
    if x.strides[1:] != adjacent or (p.batch > 1 and x.strides[0] % vector):
        return "it takes slots whose input channels are adjacent, at multiples of 16 bytes"
    if weight.strides[1:] != (p.kernel_size, 1) or weight.strides[0] % vector:
        return "it takes weights whose output channels and taps are adjacent, at multiples of 16 bytes"
    return None


def steps(problem: Problem, dtype: torch.dtype, precision: str = "ieee") -> list[Step]:
    """The launch of a step of contiguous tensors; ``problem``: as for ``choose``."""
    kernel = kernel_of(choose(*contiguous(problem, dtype), problem, precision))
    return [Step("main", kernel, kernel.shared_bytes)]


def contiguous(problem: Problem, dtype: torch.dtype) -> list[Layout]:
    """x, state and weight."""
    p = problem
    state = p.batch, p.in_channels, p.taps.shift(p.kernel_size - 1)
    return [Layout.contiguous(shape, dtype, -1) for shape in (p.in_shape, state, p.weight_shape)]


def kernel_of(config: AnyConfig):
    """The kernel of a configuration, made once."""
    module = {mma_tile.Config: mma_kernel, depthwise.Config: depthwise}.get(type(config))
    return module.make_kernel(config) if module else make_kernel(config)


def prepare(
    x: Layout, weight: Layout, bias: Layout | None, has_mask: bool, problem: Problem, config: AnyConfig
) -> Callable[..., None]:
    """A function (x, state, weight, bias, mask, y) that launches a step by ``choose``'s ``config``.

    state (N, C_in, F) and y (N, C_out, T*stride) are contiguous; bias (C_out,) need not be. Nothing is checked."""
    p, dtype = problem, x.dtype
    prepared = {mma_tile.Config: _mma, depthwise.Config: _depthwise}.get(type(config), _by_columns)
    tensors = (
        signal_like(x),
        alike((p.batch, p.in_channels, config.kept), dtype),
        weights_like(weight),
        Bias(alike((p.out_channels,), dtype), bias is not None),
        Mask(alike((p.batch,), torch.bool), has_mask),
        alike((p.batch, p.out_channels, p.length * p.stride), dtype),
    )
    launch, count = prepared(p, config, tensors, device.of(x.index).launches_early)
    copies_bias = bias is not None and not bias.is_contiguous

    def run(x, state, weight, bias, mask, y):
        bias = bias.contiguous() if copies_bias else bias
        operands = x, state, weight, weight if bias is None else bias, y if mask is None else mask, y
        if count is None:
            launch(*operands)
        else:
            launch(*operands, tickets.take(count, y.get_device()) if count else y)

    return run


# The launch, and how many tickets it takes: None for a kernel without.


def _by_columns(p: Problem, config: tile.Config, tensors: tuple, early: bool) -> tuple[Prepared, int]:
    slot_tiles, frame_tiles = -(-p.batch // config.slots), -(-p.length // config.frames)
    channel_tiles = -(-p.out_channels_per_group // config.channels)
    group_tiles = -(-p.groups // config.group_count)
    count, readers = group_tiles * slot_tiles, channel_tiles * frame_tiles
    sizes = Sizes(p.batch, p.length, p.groups, slot_tiles, frame_tiles, readers)
    blocks = group_tiles * channel_tiles * slot_tiles * frame_tiles
    launch = make_kernel(config).prepare(blocks, *tensors, alike((count,), torch.int32), sizes)
    return launch, count if config.kept and readers > 1 else 0


def _mma(p: Problem, config: mma_tile.Config, tensors: tuple, early: bool) -> tuple[Prepared, int]:
    groups, row_tiles, slot_tiles = mma_tile.blocks_of(p, config)
    count = groups * slot_tiles * -(-p.in_channels_per_group // config.stage_channels)
    slots = mma_tile.slots_of(config, p.length)
    sizes = of_problem(MmaSizes, p, frames=p.length, slots=slots, slot_tiles=slot_tiles, row_tiles=row_tiles)
    blocks, counters = groups * row_tiles * slot_tiles, alike((count,), torch.int32)
    launch = mma_kernel.make_kernel(config).prepare(blocks, *tensors, counters, sizes, early=early)
    return launch, count if config.kept and row_tiles > 1 else 0


def _depthwise(p: Problem, config: depthwise.Config, tensors: tuple, early: bool) -> tuple[Prepared, None]:
    grid = -(-p.in_channels // config.threads), p.batch, 1
    return depthwise.make_kernel(config).prepare(grid, *tensors, p.in_channels, p.length, early=early), None
