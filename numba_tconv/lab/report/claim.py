"""README's claim, made from rows."""

from __future__ import annotations

from collections.abc import Iterable

from numba_tconv.lab.measure.rows import CALL, FROZEN, Row, latest, of_main_gpu
from numba_tconv.selection.directions import FORWARD, STEP

from .tables import EMPTY, mean, where

ARITHMETIC = {"bfloat16": "bfloat16", "tf32": "TF32"}  # by a row's precision, in the claim's order


def render(rows: Iterable[Row]) -> str:
    """The selection's speed at full size, on the GPU with the most rows."""
    picked = [row for row in rows if row.rung == "auto" and "@" not in row.workload]
    picked = of_main_gpu(row for row in picked if row.direction in (FORWARD, STEP) and row.precision in ARITHMETIC)
    shown = list(latest(picked).values())
    if not shown:
        return EMPTY
    forward, steps = ([row for row in shown if row.direction == direction] for direction in (FORWARD, STEP))
    sentences = [
        "Forward, against the faster of cuDNN's transposed convolution and the same layer as an expert's ordinary "
        f"`conv1d`: {_means(forward)}."
        if forward
        else "",
        _frozen(picked) if any(row.weights == CALL for row in forward) else "",
        f"A training step, against torch's: {_means(steps)}." if steps else "",
        "Geometric means of default calls over the layers in [the tables](plots/README.md), and their range "
        f"({where(shown)}).",
        _fallback(forward),
    ]
    return "\n".join(filter(None, sentences))


def _means(rows: Iterable[Row]) -> str:
    return ", ".join(
        f"**{mean(found):.1f} times as fast in {name}** ({len(found)} layers, {min(found):.2f} to {max(found):.1f})"
        for name, found in _speedups(rows).items()
    )


def _speedups(rows: Iterable[Row]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.precision, []).append(row.opponent_ms / row.ms_p50)
    return {name: found[precision] for precision, name in ARITHMETIC.items() if precision in found}


def _frozen(picked: list[Row]) -> str:
    """Empty without layers timed both ways."""
    both: dict[str, dict[tuple, Row]] = {
        weights: latest(row for row in picked if row.direction == FORWARD and row.weights == weights)
        for weights in (CALL, FROZEN)
    }
    keys = both[CALL].keys() & both[FROZEN].keys()
    called, frozen = (_speedups(some[key] for key in keys) for some in (both[CALL], both[FROZEN]))
    said = ", ".join(
        f"{mean(frozen[name]):.1f} instead of {mean(called[name]):.1f} times in {name} ({len(frozen[name])} layers)"
        for name in frozen
    )
    return said and f"With frozen weights, where both were timed: {said}."


def _fallback(forward: list[Row]) -> str:
    counts = []
    for precision, name in ARITHMETIC.items():
        some = [row for row in forward if row.precision == precision]
        if frozen := sum(row.weights == FROZEN for row in some):
            counts.append(f"{frozen} of {len(some)} in {name}")
    if not counts:
        return ""
    return (
        f"**Timed with weights packed before the call, as in a frozen layer: {', '.join(counts)}**; "
        "these layers have no row of the default call yet."
    )
