"""Which rung computes a problem when the caller names none: decided from sizes alone, without a search."""

from __future__ import annotations

import torch

from .kernels import RUNGS
from .kernels.rung import Rung
from .problem import Problem

SMALL_FLOPS = 10_000_000  # below, packing the weights costs k4 more than it saves (a probe; no recorded row)
FEW_CHANNELS = 16  # of a group; with fewer, most threads of k3's tile compute nothing


def select(problem: Problem, dtype: torch.dtype, precision: str) -> Rung | None:
    """The highest rung that can compute ``problem`` and has enough to do, or None if there is none."""
    able = {name: r for name, r in RUNGS.items() if r.supports(problem, dtype, precision) is None}
    if problem.flops < SMALL_FLOPS and "k2_polyphase" in able:
        return able["k2_polyphase"]
    if problem.out_channels_per_group < FEW_CHANNELS and "k4_register_tile" not in able:
        able.pop("k3_shared_tile", None)
    return list(able.values())[-1] if able else None
