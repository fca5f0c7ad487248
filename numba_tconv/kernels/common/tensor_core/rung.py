"""Tensor-core rungs on the host."""

from collections.abc import Callable, Collection

import torch

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.rung import Rung
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.device import H200

from . import pack
from .tile import Tile

FEWEST_CHANNELS = 8


def default_precision(dtype: torch.dtype) -> str:
    """The fastest precision."""
    return next(precision for precision, known in DTYPES.items() if known == dtype)


def tensor_core_reason(dtype: torch.dtype, precision: str, known: Collection[str] = DTYPES) -> str | None:
    """Why a rung cannot compute ``dtype`` in ``precision``."""
    if SIMULATOR:
        return "the CUDA simulator has no tensor cores"
    if precision not in known:
        return f"it multiplies on tensor cores, in {', '.join(known)}, not in {precision}"
    if dtype != DTYPES[precision]:
        return f"{precision} is no precision of {str(dtype).removeprefix('torch.')}"
    return None


class TensorRung(Rung):
    """A rung on tensor cores; ``order`` of packed weights: "wgmma" or "mma" (pack.py).

    ``choose(problem, precision)`` returns a configuration or None."""

    order: str
    choose: Callable

    def supports(self, problem, dtype, precision):
        if reason := tensor_core_reason(dtype, precision):
            return reason
        if problem.batch >= 1 << 31:
            return "it counts samples in 32 bits"
        fewest = min(problem.in_channels_per_group, problem.out_channels_per_group)
        if problem.groups > 1 and fewest < FEWEST_CHANNELS:
            return f"it needs {FEWEST_CHANNELS} channels a group, not {fewest}: most of its products would be zeros"
        if precision == "tf32x3" and problem.in_channels_per_group < FEWEST_CHANNELS:
            return (
                f"in tf32x3 it needs {FEWEST_CHANNELS} input channels a group, not {problem.in_channels_per_group}: "
                "most of a product would be zeros, and a short sum is more exact on CUDA cores"
            )
        if self.choose(problem, precision) is None:
            return no_tile(problem)
        return None

    def config(self, problem, dtype, precision=None):
        return self.choose(problem, precision or default_precision(dtype))

    def steps(self, config, problem, device=H200):
        return [*pack.steps(config.tile, self.order), *super().steps(config, problem, device)]


def no_tile(problem: Problem) -> str:
    return (
        f"no tile fits stride {problem.stride} and dilation {problem.dilation}: the outputs of its columns "
        "would not fit in shared memory"
    )


def by_vectors(shape: tuple, strides: tuple, offset: int, tile: Tile) -> bool:
    """Whether windows of x (N, C_in, L) can be copied in aligned 16 bytes.

    ``strides``: elements; ``offset``: bytes past a 16-byte boundary."""
    vector = 16 // tile.itemsize
    if not contiguous_rows(shape, strides):
        return False
    starts = (stride for stride, size in zip(strides[:2], shape[:2], strict=True) if size > 1)
    return not any(s % vector for s in (*starts, tile.chunk_shift)) and offset == 0


def contiguous_rows(shape: tuple, strides: tuple) -> bool:
    return strides[2] == 1 or shape[2] <= 1
