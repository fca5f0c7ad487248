"""Rows of KernelBench."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from numba_tconv.lab.measure import machine, rows
from numba_tconv.lab.report import tables as table

from .kernelbench import CORRECTNESS_TRIALS, TIMED_TRIALS, Verdict

FILE = Path("kernelbench", "level1.csv")
HEADER = ["problem", "allclose 1e-4", "our error", "torch's error", "our ms", "torch's ms", "speed-up"]


@dataclass(frozen=True)
class Result(machine.Measured):
    """Mean ms with torch's default switches; ``passed`` of ``trials`` outputs allclose to torch's.

    Errors are the trials' largest.
    """

    problem: int
    weights: str
    ms_mean: float
    torch_ms_mean: float
    trials: int
    passed: int
    relerr: float
    torch_relerr: float
    largest_error: float
    torch_largest_error: float


def result_of(verdict: Verdict) -> Result:
    return Result(
        **machine.measured(),
        problem=verdict.number,
        weights=rows.CALL,
        ms_mean=verdict.ms,
        torch_ms_mean=verdict.torch_ms,
        trials=CORRECTNESS_TRIALS,
        passed=verdict.passed,
        relerr=verdict.error.norm,
        torch_relerr=verdict.torch_error.norm,
        largest_error=verdict.error.largest,
        torch_largest_error=verdict.torch_error.largest,
    )


def markdown(results: Iterable[Result]) -> str:
    return table.markdown(HEADER, [_cells(result) for result in results])


def render(results: Iterable[Result]) -> str:
    newest = sorted(rows.newest(results, lambda row: (row.gpu, row.problem)).values(), key=lambda row: row.problem)
    tables = sorted(rows.grouped(newest, lambda row: row.gpu).items())
    said = f"milliseconds (mean of {TIMED_TRIALS} calls)"
    parts = [
        f"**KernelBench level 1**, {said}, {table.where(some)} {table.note(some)}".rstrip() + f"\n\n{markdown(some)}"
        for _, some in tables
    ]
    return "\n\n".join(parts) or table.EMPTY


def _cells(result: Result) -> list:
    errors = f"{result.relerr:.1e}", f"{result.torch_relerr:.1e}"
    mark = table.MARK * (result.weights == rows.FROZEN)
    times = f"{result.ms_mean:.3g}{mark}", f"{result.torch_ms_mean:.3g}"
    speedup = f"{result.torch_ms_mean / result.ms_mean:.2f}x"
    return [result.problem, f"{result.passed} of {result.trials}", *errors, *times, speedup]
