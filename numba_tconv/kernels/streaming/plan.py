"""From the layouts of a step's tensors to its launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.arguments import Bias, signal_like, weights_like
from numba_tconv.kernels.rung import Step
from numba_tconv.runtime.kernel import alike
from numba_tconv.runtime.layout import Layout

from . import tickets
from .arguments import Mask, Stream
from .kernel import make_kernel
from .tile import Config, choose


def steps(problem: Problem, dtype: torch.dtype) -> list[Step]:
    """What a step of ``problem.length`` new frames in ``problem.batch`` slots launches."""
    kernel = make_kernel(choose(problem, dtype))
    return [Step("main", kernel, kernel.shared_bytes)]


def prepare(
    x: Layout, weight: Layout, bias: Layout | None, has_mask: bool, problem: Problem, config: Config | None = None
) -> Callable[..., None]:
    """A function (x, state, weight, bias, mask, y) that launches a step.

    ``problem``: as for ``steps``. state (N, C_in, F) and y (N, C_out, T*stride) are contiguous, bias (C_out,) too.
    Nothing is checked.
    """
    p, dtype = problem, x.dtype
    config = config or choose(p, dtype)
    slot_tiles, frame_tiles = -(-p.batch // config.slots), -(-p.length // config.frames)
    channel_tiles = -(-p.out_channels_per_group // config.channels)
    group_tiles = -(-p.groups // config.group_count)
    count = group_tiles * slot_tiles
    readers = channel_tiles * frame_tiles
    launch = make_kernel(config).prepare(
        group_tiles * channel_tiles * slot_tiles * frame_tiles,
        signal_like(x),
        alike((p.batch, p.in_channels, config.kept), dtype),
        weights_like(weight),
        Bias(alike((p.out_channels,), dtype), bias is not None),
        Mask(alike((p.batch,), torch.bool), has_mask),
        alike((p.batch, p.out_channels, p.length * p.stride), dtype),
        alike((count,), torch.int32),
        Stream(p.batch, p.length, p.groups, slot_tiles, frame_tiles, readers),
    )
    needs_tickets = config.kept > 0 and readers > 1

    def run(x, state, weight, bias, mask, y):
        counters = tickets.take(count, y.get_device()) if needs_tickets else y
        launch(x, state, weight, weight if bias is None else bias, y if mask is None else mask, y, counters)

    return run
