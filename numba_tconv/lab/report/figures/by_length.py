"""Throughput against length, of one sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from numba_tconv.lab.measure.rows import Row

from .chosen import rungs
from .labels import label_points
from .style import CONV1D, CUDNN, ROOFLINE, look
from .words import caption, layer, measured_on, words


def throughput(rows: list[Row], live: Sequence[Row] = ()) -> Figure:
    """GB/s of minimum traffic on the left, TFLOP/s on the right."""
    rows, live = _on_the_grid(rows), _on_the_grid(live)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _panel(left, rows, live, lambda row: row.gbps, "GB/s (minimum traffic / time)")
    _panel(right, rows, live, lambda row: row.tflops, "TFLOP/s")
    first = (rows or live)[0]
    workload, _, fixed = first.workload.partition("@")
    held = "batch x length fixed" if fixed == "total" else f"batch {fixed.removeprefix('batch')}"
    figure.suptitle(f"{layer(workload)}, {held}, {first.direction}, {words(first)}", fontsize=10)
    caption(figure, measured_on(rows, live))
    return figure


def _on_the_grid(rows: Sequence[Row]) -> list[Row]:
    """The rows at powers of two, if any: their neighbours would overlap them."""
    powers = [row for row in rows if row.length & (row.length - 1) == 0]
    return powers or list(rows)


def _panel(axes: Axes, rows: list[Row], live: Sequence[Row], value: Callable[[Row], float], unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    labels = []

    def line(points, label, style):
        points = sorted(points)
        if points:
            axes.plot(*zip(*points, strict=True), markersize=4.5, **style)
            labels.append((points[-1], label))

    for rung in rungs(rows):
        line([(row.length, value(row)) for row in rows if row.rung == rung], rung, look(rung))
    for rung in rungs(live):
        style = look(rung) | {"linestyle": "-.", "markerfacecolor": "white"}
        line([(row.length, value(row)) for row in live if row.rung == rung], f"{rung}, live", style)
    # cuDNN, conv1d and the roofline are from the fastest row's run.
    best = {}
    for row in sorted(rows or live, key=lambda row: -row.ms_p50):
        best[row.length] = row
    line([(n, value(r) * r.ms_p50 / r.cudnn_ms_p50) for n, r in best.items()], "cuDNN", CUDNN)
    line([(n, value(r) * r.ms_p50 / r.conv1d_ms_p50) for n, r in best.items() if r.conv1d_ms_p50], "conv1d", CONV1D)
    line([(n, value(r) / r.roofline) for n, r in best.items() if r.roofline], "roofline", ROOFLINE)
    axes.set_xlabel("length (samples)")
    axes.set_ylabel(unit)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    label_points(axes, labels)
