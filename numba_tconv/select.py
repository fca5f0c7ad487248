"""Which rung computes a problem when the caller names none: decided from sizes alone, without a search."""

from __future__ import annotations

import torch

from .kernels import RUNGS
from .kernels.depthwise_config import choose
from .kernels.device import Device
from .kernels.rung import Rung
from .problem import Problem

# For the tensor cores and for k4; below, packing the weights costs more than it saves (a probe; no recorded row).
SMALL_FLOPS = 10_000_000
FEW_CHANNELS = 16  # of a group; with fewer, most threads of k3's tile compute nothing
STRONGER = {"k4_register_tile", "k5_mma"}  # where depthwise cannot keep its weights in registers
# In the place of a precision: the caller has named none, and torch's switch lets convolutions use TF32.
TF32_ALLOWED = "tf32 allowed"


def select(problem: Problem, dtype: torch.dtype, precision: str, device: Device) -> Rung | None:
    """The highest rung that can compute ``problem`` and is meant for such, or None if there is none."""
    able = _able(problem, dtype, precision, device)
    if special := _special(problem, dtype, able):
        return special
    able.pop("depthwise", None)
    if problem.out_channels_per_group < FEW_CHANNELS and "k4_register_tile" not in able:
        able.pop("k3_shared_tile", None)
    suited = [rung for rung in able.values() if rung.suits(problem, dtype, precision, device)]
    return [None, *able.values(), *suited][-1]


def arithmetic(problem: Problem, dtype: torch.dtype, variant: str, precision: str, device: Device) -> str:
    """``precision``, or what the permission to use TF32 comes to: "tf32" where a rung gains by it, else "ieee".

    "tf32x3" promises errors like those of float32, not tensor cores: where no rung can do the problem in it, that
    comes to "ieee", which is no further from the exact result.

    ``variant``: the name of the one rung that may compute it, or "". A rung that is named is never replaced, so what
    it cannot do stays.
    """
    if precision == "tf32x3" and not variant:
        return precision if select(problem, dtype, precision, device) else "ieee"
    if precision != TF32_ALLOWED:
        return precision
    if variant:
        return "ieee" if RUNGS[variant].refusal(problem, dtype, "tf32", device) else "tf32"
    if _special(problem, dtype, _able(problem, dtype, "ieee", device)):
        return "ieee"
    return "tf32" if select(problem, dtype, "tf32", device) else "ieee"


def _able(problem, dtype, precision, device) -> dict[str, Rung]:
    return {name: rung for name, rung in RUNGS.items() if rung.refusal(problem, dtype, precision, device) is None}


def _special(problem: Problem, dtype: torch.dtype, able: dict[str, Rung]) -> Rung | None:
    """The rung among ``able`` for a problem that is no work for the ladder's upper end, or None if it is."""
    # depthwise packs nothing, so it is for small problems too; with more weights than registers it stands in for those
    # that cannot do groups of few channels, or not the dtype.
    if "depthwise" in able and (not able.keys() & STRONGER or choose(problem, dtype).keeps_weights):
        return able["depthwise"]
    return able.get("k2_polyphase") if problem.flops < SMALL_FLOPS else None
