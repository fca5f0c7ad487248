"""README's first lines: how fast the package is, in two sentences made from the recorded rows."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .directions import FORWARD, STEP
from .rows import Row, latest, of_newest_gpu
from .table import EMPTY, where

ARITHMETIC = {"bfloat16": "bfloat16", "tf32": "TF32"}  # by a row's precision, in the order in which they are told


def render(rows: Iterable[Row]) -> str:
    """The claim of what the selection picks, at full size, on the GPU of the newest such row."""
    picked = [row for row in rows if row.rung == "auto" and "@" not in row.workload]
    picked = [row for row in picked if row.direction in (FORWARD, STEP) and row.precision in ARITHMETIC]
    picked = list(latest(of_newest_gpu(picked)).values())
    if not picked:
        return EMPTY
    commits = ", ".join(dict.fromkeys(row.commit for row in picked))
    forward, steps = (_means(row for row in picked if row.direction == direction) for direction in (FORWARD, STEP))
    sentences = [
        "Forward, against the faster of cuDNN's transposed convolution and the same layer as an expert's ordinary "
        f"`conv1d`: {forward}."
        if forward
        else "",
        f"A training step, against torch's: {steps}." if steps else "",
        "Geometric means of what the selection picks (`auto`) over the workloads [below](#measured), and the least and "
        f"the most of them ({where(picked)}, commit {commits}).",
    ]
    return "\n".join(filter(None, sentences))


def _means(rows: Iterable[Row]) -> str:
    """Of each arithmetic the mean of the speed-ups, how many there are, and their range."""
    speedups: dict[str, list[float]] = {}
    for row in rows:
        speedups.setdefault(row.precision, []).append(row.opponent_ms / row.ms_p50)
    return ", ".join(
        f"**{math.exp(sum(map(math.log, found)) / len(found)):.1f} times as fast in {name}** "
        f"({len(found)} layers, {min(found):.2f} to {max(found):.1f})"
        for precision, name in ARITHMETIC.items()
        if (found := speedups.get(precision))
    )
