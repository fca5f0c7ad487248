"""The rung for a problem, chosen by sizes alone."""

from dataclasses import dataclass

import torch

from numba_tconv.formula.precision import TF32_ALLOWED
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.depthwise import long_tile as depthwise_long_tile
from numba_tconv.kernels.depthwise.tile import choose
from numba_tconv.kernels.rung import Rung
from numba_tconv.runtime.device import Device

from .registry import RUNGS

# Smaller problems with sums up to SHORT_SUM products do not repay packing.
SMALL_FLOPS, SHORT_SUM = 10_000_000, 64
OLDEST = 8, 0  # compute capability; below, torch is faster on dense layers
STRONGER = {"k4_register_tile", "k5_mma"}  # than depthwise without its weights in registers


@dataclass(frozen=True)
class Decision:
    """The rung, None where torch computes (``by_torch``) or none can; reasons against others."""

    rung: Rung | None
    passed_over: dict[str, str]
    by_torch: bool = False


def select(problem: Problem, dtype: torch.dtype, precision: str, device: Device) -> Rung | None:
    return decide(problem, dtype, precision, device).rung


def decide(problem: Problem, dtype: torch.dtype, precision: str, device: Device) -> Decision:
    """The highest able rung that suits ``problem``."""
    refusals = {name: rung.refusal(problem, dtype, precision, device) for name, rung in RUNGS.items()}
    able = {name: rung for name, rung in RUNGS.items() if refusals[name] is None}
    if special := _special(problem, dtype, able, device):
        taken, reason = special
        reasons = dict.fromkeys(able, reason)
    elif device.cc < OLDEST:
        taken, least = None, ".".join(map(str, OLDEST))
        reasons = dict.fromkeys(able, f"below compute capability {least} torch's own operator is for dense layers")
    else:
        misfits = {name: _misfit(rung, problem, dtype, precision, device) for name, rung in able.items()}
        suited = [rung for name, rung in able.items() if misfits[name] is None]
        taken = [None, *able.values(), *suited][-1]
        reasons = {name: misfit or f"{taken.name} is above it" for name, misfit in misfits.items()}
    reasons = {name: refusals[name] or reasons[name] for name in RUNGS}
    if taken:
        del reasons[taken.name]
    return Decision(taken, reasons, not taken and device.cc < OLDEST and precision not in ("tf32", "tf32x3"))


def arithmetic(problem: Problem, dtype: torch.dtype, variant: str, precision: str, device: Device) -> str:
    """``precision``, but "tf32" for TF32_ALLOWED where a rung gains by it, else "ieee".

    ``variant``: the only rung allowed, or "". Without it, "tf32x3" becomes "ieee" where no rung has it.
    """
    if precision == "tf32x3" and not variant:
        return precision if select(problem, dtype, precision, device) else "ieee"
    if precision != TF32_ALLOWED:
        return precision
    if variant:
        return "ieee" if RUNGS[variant].refusal(problem, dtype, "tf32", device) else "tf32"
    able = {name: rung for name, rung in RUNGS.items() if rung.refusal(problem, dtype, "ieee", device) is None}
    if _special(problem, dtype, able, device):
        return "ieee"
    return "tf32" if select(problem, dtype, "tf32", device) else "ieee"


def _special(problem: Problem, dtype: torch.dtype, able: dict[str, Rung], device: Device) -> tuple[Rung, str] | None:
    """The rung for small or depthwise problems and why not others."""
    # Without weights in registers, depthwise takes short sums and what no stronger rung takes.
    if "depthwise" in able:
        if choose(problem, dtype).keeps_weights:
            return able["depthwise"], "depthwise is for few channels a group, whose weights its registers hold"
        if depthwise_long_tile.is_meant(problem, dtype, device.cc):
            most = f"of up to {depthwise_long_tile.MOST_TERMS} products an output"
            return able["depthwise"], f"depthwise is for few channels a group, {most}"
        if not able.keys() & STRONGER:
            return able["depthwise"], "depthwise is for few channels a group where no rung above k3 can do them"
    short = problem.terms() <= SHORT_SUM or dtype == torch.float64
    if "k2_polyphase" in able and problem.flops < SMALL_FLOPS and short:
        small = f"k2_polyphase is for short sums of fewer than {SMALL_FLOPS:,} FLOPs"
        return able["k2_polyphase"], f"{small}, where packed weights and tiles cost more than they save"
    return None


def _misfit(rung: Rung, problem: Problem, dtype: torch.dtype, precision: str, device: Device) -> str | None:
    """Why an able ``rung`` does not suit the problem."""
    if rung.name == "depthwise":
        return "it is for weights that its registers hold, for short sums, and for what no rung above k3 takes"
    return rung.unsuited(problem, dtype, precision, device)
