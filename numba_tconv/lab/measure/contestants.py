"""Contestants by name."""

import torch

from numba_tconv.formula.precision import peak_name
from numba_tconv.formula.problem import Problem
from numba_tconv.runtime.device import Device, current_device
from numba_tconv.selection.directions import FORWARD, STEP, rung_direction, rungs_of

AUTO, CUDNN = "auto", "cudnn"


def rungs_for(
    names: list[str],
    problem: Problem,
    dtype: torch.dtype,
    precision: str,
    device: Device | None = None,
    direction: str = FORWARD,
) -> tuple[list[str], list[str]]:
    """Contestants of ``names``, and a line for each rung that "all" leaves out.

    "all" is ``auto`` (the selection) and every able rung on ``device`` (None: torch's current GPU, else the H200), or
    ``cudnn`` where none has ``precision``. Raises ValueError for a name that is unknown or of another direction,
    NotImplementedError where ``auto`` or a named rung cannot do the problem.
    """
    peak, device = peak_name(dtype, precision), device or current_device()
    rungs = rungs_of(FORWARD if direction == STEP else direction)
    refusals = {name: rung.refusal(problem, dtype, peak, device) for name, rung in rungs.items()}
    single = {} if direction == STEP else rungs
    allowed = [peak, "ieee"] if peak == "tf32" else [peak]
    selects = any(rung.refusal(problem, dtype, own, device) is None for rung in rungs.values() for own in allowed)
    chosen, left_out = [], []
    for name in dict.fromkeys(names):
        if name == "all":
            able = [rung for rung in rungs if refusals[rung] is None]
            left_out += [f"{rung} cannot do {problem} in {peak}: {refusals[rung]}" for rung in single if refusals[rung]]
            chosen += [*(rung for rung in able if rung in single), AUTO] if selects else [CUDNN]
        elif name == CUDNN:
            chosen.append(name)
        elif name == AUTO:
            if not selects:
                raise NotImplementedError(f"no rung can do {problem} in {peak}, so there is none to select")
            chosen.append(name)
        elif name not in single:
            there_are = ", ".join([*single, AUTO, CUDNN, "all"])
            raise ValueError(f"{_not_in(direction, name)}; there are {there_are}")
        elif refusals[name]:
            raise NotImplementedError(f"{name} cannot do {problem} in {peak}: {refusals[name]}")
        else:
            chosen.append(name)
    return list(dict.fromkeys(chosen)), left_out


def _not_in(direction: str, name: str) -> str:
    words = {FORWARD: "the forward pass", STEP: "a whole step"}
    try:
        computes = rung_direction(name)
    except ValueError:
        return f"no rung is called {name!r}"
    return f"{name} computes {words.get(computes, computes)}, not {words.get(direction, direction)}"
