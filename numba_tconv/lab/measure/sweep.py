"""Curves over length."""

from numba_tconv.formula.problem import Problem

from . import workloads
from .rows import Row
from .timing import FEWEST_REPEATS, WARMUP_CALLS
from .workloads import Workload

LAYERS = ("kb64", "kb74", "kb79", "hifigan_u1", "hifigan_u3", "dac_u1", "encodec_u4", "depthwise")
BATCH = 16
SHORTEST, LONGEST = 2**10, 2**20  # samples of output


def lengths(problem: Problem, shortest: int = SHORTEST, longest: int = LONGEST, factor: int = 2) -> list[int]:
    """Input lengths for powers of two from ``shortest`` to ``longest`` output samples, ``factor`` apart.

    An input position is ``stride`` samples, whatever the padding. Raises ValueError if no power fits.
    """
    samples = 1
    while samples < shortest:
        samples *= 2
    found = []
    while samples <= longest:
        found.append(max(1, samples // problem.stride))
        samples *= factor
    if not found:
        raise ValueError(f"there is no power of two from {shortest} to {longest}")
    return list(dict.fromkeys(found))


def neighbours(some: list[int]) -> list[int]:
    """L - 1 and L + 1 at a quarter, half and three quarters of the lengths."""
    chosen = {some[len(some) * quarter // 4] for quarter in (1, 2, 3)}
    return [one for length in sorted(chosen) for one in (length - 1, length + 1) if one]


def curve(layer: Workload, some: list[int], batch: int = BATCH) -> list[Workload]:
    return [workloads.at_length(layer, length, batch) for length in sorted(some)]


def affordable(names: list[str], before: list[Row], problem: Problem, budget_s: float) -> list[str]:
    """Contestants without a row, or whose fewest calls take ``budget_s`` seconds at most, at their rate in
    ``before``."""
    calls, rates = WARMUP_CALLS + FEWEST_REPEATS, {row.rung: row.tflops for row in before}
    return [name for name in names if name not in rates or calls * problem.flops / rates[name] <= 1e12 * budget_s]
