"""Directions: forward pass, gradients, training step."""

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.rung import Rung

from .gradient import GRADIENTS
from .registry import RUNGS

FORWARD, STEP = "forward", "step"
OF_GRADIENTS = ("grad_input", "grad_weight", "grad_bias")
RESULTS = (FORWARD, *OF_GRADIENTS)
DIRECTIONS = (FORWARD, "grad_input", "grad_weight", STEP)


def results_of(direction: str, p: Problem) -> tuple[str, ...]:
    if direction != STEP:
        return (direction,)
    return RESULTS if p.bias else RESULTS[:-1]


def rungs_of(direction: str) -> dict[str, Rung]:
    """The rungs for ``direction``, one result."""
    if direction == FORWARD:
        return RUNGS
    return {name: rung for name, rung in GRADIENTS.items() if rung.of == direction}


def rung_direction(name: str) -> str:
    """The named rung's result. Raises ValueError for an unknown name."""
    if name in RUNGS:
        return FORWARD
    if name in GRADIENTS:
        return GRADIENTS[name].of
    raise ValueError(f"no rung is called {name!r}; there are {', '.join([*RUNGS, *GRADIENTS])}")
