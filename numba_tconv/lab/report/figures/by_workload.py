"""Shares of the roofline, by workload."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from numba_tconv.lab.measure.rows import Row

from .chosen import fastest, rungs, workloads
from .style import CONV1D, CUDNN, SMALL, look, marks
from .words import caption, measured_on, words


def shares(rows: list[Row]) -> Figure:
    """Shares that rungs, cuDNN and conv1d reach, a line of marks for each workload."""
    rows = [row for row in rows if row.roofline is not None]
    names = workloads(rows)
    figure = Figure(figsize=(7.5, 1.5 + 0.42 * len(names)), layout="constrained")
    axes = figure.subplots()
    for rung in rungs(rows):
        of_rung = [row for row in rows if row.rung == rung]
        _line(axes, [(names.index(row.workload), row.roofline) for row in of_rung], rung, look(rung))
    best = [fastest(row for row in rows if row.workload == name) for name in names]
    theirs = [(i, row.floor_ms / row.cudnn_ms_p50) for i, row in enumerate(best)]
    _line(axes, theirs, "cuDNN", CUDNN)
    _line(axes, [(i, r.floor_ms / r.conv1d_ms_p50) for i, r in enumerate(best) if r.conv1d_ms_p50], "conv1d", CONV1D)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("share of the roofline (floor time / time)")
    figure.legend(loc="outside upper center", ncols=6, frameon=False, fontsize=SMALL)
    if rows:
        caption(figure, f"{rows[0].direction}, {words(rows[0])}; {measured_on(rows)}")
    return figure


def _line(axes: Axes, points: list[tuple[int, float]], label: str, style: dict) -> None:
    if points:
        heights, values = zip(*points, strict=True)
        axes.plot(values, heights, **marks(style), markersize=7, label=label, clip_on=False)
