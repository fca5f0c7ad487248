"""Which rung computes a problem when the caller names none: decided from sizes alone, without a search."""

from __future__ import annotations

import torch

from .kernels import RUNGS
from .kernels.rung import Rung
from .problem import Problem


def select(problem: Problem, dtype: torch.dtype, precision: str) -> Rung | None:
    """The highest rung that can compute ``problem``, or None if there is none."""
    able = [rung for rung in RUNGS.values() if rung.supports(problem, dtype, precision) is None]
    return able[-1] if able else None
