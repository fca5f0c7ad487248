"""Errors by precision."""

from matplotlib.figure import Figure

from numba_tconv.lab.measure.rows import Row
from numba_tconv.selection.directions import DIRECTIONS

from .chosen import arithmetics, drawn, grouped, taken, workloads
from .style import CUDNN, SMALL, look, marks
from .words import caption, measured_on, words

HEADING = 0.8


def errors(rows: list[Row]) -> Figure:
    """Errors of ``auto``, else the fastest rung, and of torch, but for 0.

    A mark for each workload, a line for each direction, dtype and precision.
    """
    rows = [row for row in rows if drawn(row)]
    figure, height, ticks = Figure(layout="constrained"), 0.0, []
    axes = figure.subplots()
    groups = grouped(rows, lambda row: (row.direction,))
    for (direction,), of_direction in sorted(groups.items(), key=lambda one: DIRECTIONS.index(*one[0])):
        axes.text(0.005, height, direction, transform=axes.get_yaxis_transform(), style="italic", va="center")
        height += HEADING
        for some in arithmetics(of_direction).values():
            best = [taken(some, name) for name in workloads(some)]
            sides = ([row.relerr for row in best], look("k6_wgmma"), -0.17, "ours")
            theirs = ([row.cudnn_relerr for row in best], CUDNN, 0.17, "torch")
            for found, style, shift, label in (sides, theirs):
                axes.plot(found, [height + shift] * len(found), **marks(style), markersize=4.5, alpha=0.7,
                          label=None if ticks else label)  # fmt: skip
            ticks.append((height, words(some[0])))
            height += 1
    axes.set_xscale("log")
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.set_ylim(height - 0.4, -0.6)
    axes.set_xlabel("error against float64 (relative norm, logarithmic), a mark for each workload")
    axes.set_title(finding(rows), fontsize=9)
    axes.legend(loc="upper right", frameon=False, fontsize=SMALL)
    figure.set_size_inches(7.5, 1.3 + 0.22 * height)
    axes.tick_params(axis="y", labelsize=SMALL)
    caption(figure, measured_on(rows))
    return figure


def finding(rows: list[Row]) -> str:
    of_each = grouped([row for row in rows if drawn(row)], lambda row: (row.direction, row.dtype, row.precision))
    best = [taken(some, name) for some in of_each.values() for name in workloads(some)]
    smaller = sum(row.relerr <= 1.02 * row.cudnn_relerr for row in best)
    return f"Errors are torch's or smaller in {smaller} of {len(best)} measurements"
