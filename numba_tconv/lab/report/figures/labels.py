"""Labels beside points."""

from __future__ import annotations

from matplotlib.axes import Axes

from .style import SMALL

GAP = 11  # points between baselines


def label_points(axes: Axes, labels: list[tuple[tuple[float, float], str]]) -> None:
    """Write each label to the right of its point, moved up off the one below."""
    axes.figure.draw_without_rendering()  # fixes places
    points = 72 / axes.figure.dpi
    below = None
    for (x, y), label in sorted(labels, key=lambda one: one[0][1]):
        at = axes.transData.transform((x, y))[1] * points
        height = at if below is None else max(at, below + GAP)
        below = height
        axes.annotate(label, (x, y), xytext=(8, height - at), textcoords="offset points", va="center", fontsize=SMALL)
