"""Shares of the roofline."""

from statistics import geometric_mean, median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from numba_tconv.lab.measure.rows import Row

from .chosen import drawn, marked, rungs, taken, workloads
from .style import CONV1D, CUDNN, SMALL, TINY, look, marks
from .words import caption, measured_on, words

LINE = 0.19  # inches


def shares(rows: list[Row]) -> Figure:
    """Shares of the roofline that rungs, cuDNN and conv1d reach, a line for each workload."""
    rows = [row for row in rows if row.roofline is not None and drawn(row)]
    names = workloads(rows)
    figure = Figure(figsize=(7.5, 1.3 + LINE * len(names)), layout="constrained")
    axes = figure.subplots()
    best = [taken(rows, name) for name in names]
    axes.hlines(
        range(len(best)), [r.floor_ms / r.opponent_ms for r in best], [r.roofline for r in best], color="0.75", lw=2.5
    )
    shown = marked(rows)
    for rung in rungs(shown):
        of_rung = [row for row in shown if row.rung == rung]
        _line(axes, [(names.index(row.workload), row.roofline) for row in of_rung], rung, look(rung))
    theirs = [(i, row.floor_ms / row.cudnn_ms_p50) for i, row in enumerate(best)]
    _line(axes, theirs, "cuDNN", CUDNN)
    _line(axes, [(i, r.floor_ms / r.conv1d_ms_p50) for i, r in enumerate(best) if r.conv1d_ms_p50], "conv1d", CONV1D)
    for place, row in enumerate(best):
        axes.annotate(f"{row.opponent_ms / row.ms_p50:.1f}x", (1.01, place), xycoords=axes.get_yaxis_transform(),
                      fontsize=TINY, va="center", annotation_clip=False)  # fmt: skip
    axes.set_yticks(range(len(names)), names, fontsize=TINY)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("share of the roofline (floor time / time); at the right: times as fast as torch", fontsize=SMALL)
    axes.grid(axis="y", visible=False)
    if rows:
        axes.set_title(finding(rows), fontsize=9)
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=SMALL)
    if rows:
        caption(figure, f"{rows[0].direction}, {words(rows[0])}; {measured_on(rows)}")
    return figure


def finding(rows: list[Row]) -> str:
    rows = [row for row in rows if drawn(row)]
    best = [taken(rows, name) for name in workloads(rows)]
    gains, reached = [row.opponent_ms / row.ms_p50 for row in best], median(row.roofline for row in best)
    return (
        f"{geometric_mean(gains):.1f} times as fast as torch over {len(best)} layer{'s' * (len(best) > 1)}, "
        f"at {reached:.0%} of the roofline ({rows[0].direction}, {words(rows[0])})"
    )


def _line(axes: Axes, points: list[tuple[int, float]], label: str, style: dict) -> None:
    if points:
        heights, values = zip(*points, strict=True)
        axes.plot(values, heights, **marks(style), markersize=5, label=label, clip_on=False)
