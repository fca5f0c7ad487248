"""What the tensor-core rungs share on the host: which problems they take, and how they take their input."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..ptx import SIMULATOR
from .rung import Rung
from .tensor_tile import DTYPES, Tile

FEWEST_CHANNELS = 8  # of a group: with fewer, most of a product is zeros


def default_precision(dtype: torch.dtype) -> str:
    """The tensor cores' fastest precision for a dtype."""
    return next(precision for precision, known in DTYPES.items() if known == dtype)


class TensorRung(Rung):
    """A rung on tensor cores: ``choose`` finds a problem's configuration in a precision, or None, and ``make_kernel``
    makes a configuration's kernel, once."""

    choose: Callable
    make_kernel: Callable

    def supports(self, problem, dtype, precision):
        if SIMULATOR:
            return "the CUDA simulator has no tensor cores"
        if precision not in DTYPES:
            return f"it multiplies on tensor cores, in {', '.join(DTYPES)}, not in {precision}"
        if dtype != DTYPES[precision]:
            return f"{precision} is no precision of {str(dtype).removeprefix('torch.')}"
        fewest = min(problem.in_channels_per_group, problem.out_channels_per_group)
        if problem.groups > 1 and fewest < FEWEST_CHANNELS:
            return f"it needs {FEWEST_CHANNELS} channels a group, not {fewest}: most of its products would be zeros"
        if self.choose(problem, precision) is None:
            return (
                f"no tile fits stride {problem.stride} and dilation {problem.dilation}: the outputs of its columns "
                "would not fit in shared memory"
            )
        return None

    def config(self, problem, dtype, precision=None):
        return self.choose(problem, precision or default_precision(dtype))

    def kernel(self, config):
        return self.make_kernel(config)


# How the rows of x lie: every 16 bytes of them aligned; contiguous, but not aligned; or not even contiguous.
ALIGNED, UNALIGNED, SCATTERED = 0, 1, 2


def layout_of(x: torch.Tensor, tile: Tile, in_per_group: int) -> int:
    """The layout of ``x`` as the tile's windows see it."""
    vector = 16 // x.element_size()
    if x.stride(2) != 1 and x.shape[2] > 1:
        return SCATTERED
    starts = (stride for stride, size in zip(x.stride()[:2], x.shape[:2], strict=True) if size > 1)
    if any(s % vector for s in (*starts, tile.chunk_shift)) or x.data_ptr() % 16:
        # Rows are copied as they lie in whole stages only: one that lacks channels is filled with zeros.
        return SCATTERED if in_per_group % tile.depth else UNALIGNED
    return ALIGNED
