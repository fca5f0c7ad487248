"""What a rung of the ladder is to the rest of the package."""

from __future__ import annotations

import torch

from ..elements import ELEMENTS
from ..launch import Kernel
from ..problem import Problem

# The error of a sum grows with its length, so rungs add up the products of this many input channels apart.
SUM_CHANNELS = 64


class Rung:
    """One way to compute the forward pass. Subclasses live in one file each, named like the rung."""

    name: str
    idea: str

    def supports(self, problem: Problem, dtype: torch.dtype, precision: str) -> str | None:
        """None if this rung computes ``problem``, otherwise the reason why it cannot."""
        raise NotImplementedError

    def config(self, problem: Problem, dtype: torch.dtype):
        """The compile-time choices for ``problem``: a frozen dataclass, equal for equal machine code."""
        raise NotImplementedError

    def tiny_configs(self, problem: Problem, dtype: torch.dtype) -> list:
        """Configurations with tiles so small that seams and tails occur in tiny problems."""
        return [self.config(problem, dtype)]

    def kernel(self, config) -> Kernel:
        """The kernel of a configuration, made once."""
        raise NotImplementedError

    def shared_bytes(self, problem: Problem, config) -> int:
        """Dynamic shared memory of a block, in bytes."""
        return self.kernel(config).shared_bytes

    def run(self, x, w, bias, y, problem: Problem, config=None) -> None:
        """Launch: x (N, C_in, L) and w (C_in, C_out/groups, K) of any strides, bias (C_out,) or None, into y.

        ``y`` is contiguous (N, C_out, L_out). Nothing is checked here.
        """
        raise NotImplementedError


def cuda_core_reason(dtype: torch.dtype, precision: str) -> str | None:
    """Why a kernel on CUDA cores cannot take ``dtype`` in ``precision``; None if it can."""
    if dtype not in ELEMENTS:
        return f"it takes {', '.join(e.name for e in ELEMENTS.values())}, not {str(dtype).removeprefix('torch.')}"
    if precision in ("tf32", "tf32x3"):
        return f"it multiplies on CUDA cores, in full precision, not in {precision}"
    return None
