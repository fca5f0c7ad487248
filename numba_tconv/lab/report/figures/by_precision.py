"""Errors against float64, by precision."""

from __future__ import annotations

from matplotlib.figure import Figure

from numba_tconv.lab.measure.rows import Row

from .chosen import arithmetics, rungs
from .style import CUDNN, SMALL, look, marks
from .words import caption, measured_on, words

CUDNN_NAME = "cuDNN"
HEADING = 1.0  # height, of a line's 1


def errors(rows: list[Row]) -> Figure:
    """Relative errors of each rung and of cuDNN in each dtype and precision, a mark for each workload. ``rows`` are of
    one direction at full size; errors of 0 are left out."""
    figure, height, ticks = Figure(layout="constrained"), 0.0, []
    axes = figure.subplots()
    for some in arithmetics(rows).values():
        axes.text(
            0.005, height + 0.05, words(some[0]), transform=axes.get_yaxis_transform(), style="italic", va="center"
        )
        height += HEADING
        lines = {rung: ([row.relerr for row in some if row.rung == rung], look(rung)) for rung in rungs(some)}
        lines[CUDNN_NAME] = (list({row.workload: row.cudnn_relerr for row in some}.values()), CUDNN)
        for name, (found, style) in lines.items():
            axes.plot(found, [height] * len(found), **marks(style), markersize=6, alpha=0.8)
            ticks.append((height, name))
            height += 1
    axes.set_xscale("log")
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.set_ylim(height - 0.4, -0.6)
    axes.set_xlabel("error against float64 (relative norm), a mark for each workload")
    figure.set_size_inches(7.5, 1.0 + 0.23 * height)
    axes.tick_params(axis="y", labelsize=SMALL)
    caption(figure, f"{rows[0].direction}; {measured_on(rows)}")
    return figure
