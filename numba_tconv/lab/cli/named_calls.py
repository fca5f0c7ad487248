"""Calls that a command line names."""

import contextlib
import itertools

import torch

from numba_tconv.formula.precision import TF32_ALLOWED, peak_name
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure.contestants import AUTO, rungs_for
from numba_tconv.runtime.device import Device
from numba_tconv.selection.directions import FORWARD, STEP, rungs_of
from numba_tconv.torch_api.compile_ahead import Call, parts, selected
from numba_tconv.torch_api.functional import default_precision


def calls(
    names: list[str],
    problems: list[Problem],
    arithmetics: list[tuple[torch.dtype, str | None]],
    device: Device,
    direction: str = FORWARD,
) -> list[Call]:
    """Calls of each problem, dtype and precision by the rungs of ``names``.

    Skips rungs that cannot do a problem. Raises ValueError as ``rungs_for``.
    """
    found = []
    for problem in problems:
        for dtype, named in arithmetics:
            asked = peak_name(dtype, named) if named else default_precision(dtype)
            for name in names:
                if name == AUTO or (name, direction) == ("all", STEP):
                    ways = ("tf32", TF32_ALLOWED) if asked == "tf32" else (asked,)
                    for one, way in itertools.product(parts(direction), ways):
                        found += selected(one, problem, dtype, way, device)
                else:
                    found += _by_rungs(name, problem, dtype, asked, device, direction)
    return list(dict.fromkeys(found))


def _by_rungs(name: str, problem: Problem, dtype: torch.dtype, asked: str, device: Device, direction: str):
    """Like ``calls``; TF32_ALLOWED means TF32 where the rung has it."""
    found = {}
    for precision in ("tf32", "ieee") if asked == TF32_ALLOWED else (asked,):
        with contextlib.suppress(NotImplementedError):
            rungs, _ = rungs_for([name], problem, dtype, precision, device, direction)
            for rung in rungs:
                if rung in rungs_of(direction):
                    found.setdefault(rung, Call(rung, problem, dtype, precision, device))
    return found.values()
