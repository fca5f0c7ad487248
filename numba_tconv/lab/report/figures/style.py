"""Style, legible in grey and for the colour-blind."""

import re

from matplotlib.axes import Axes

from numba_tconv.selection.directions import DIRECTIONS, OF_GRADIENTS, rungs_of
from numba_tconv.selection.directions import STEP as WHOLE_STEP

STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "axes.axisbelow": True,
    "figure.dpi": 150,
    "svg.fonttype": "none",
    "svg.hashsalt": "numba_tconv",  # same rows, same file
}

# From light to dark.
LADDER = ("#9ecae1", "#6baed6", "#3182bd", "#08519c", "#35208e", "#20104f")
MARKERS = "osDv^P"
STEP = r"k(\d+)_"
PLACES = {name: place for of in OF_GRADIENTS for place, name in enumerate(rungs_of(of))}
KNOWN = {name for of in DIRECTIONS if of != WHOLE_STEP for name in rungs_of(of)}
_new: dict[str, int] = {}
BESIDE = {"depthwise": {"color": "#009E73", "marker": "h"}, "k5_dmma": {"color": LADDER[4], "marker": "d"}}
CUDNN = {"color": "#D55E00", "linestyle": "--", "marker": "x"}
CONV1D = {"color": "#8f5a83", "linestyle": ":", "marker": "+"}
TORCH = {"color": "#D55E00", "linestyle": "--", "marker": ""}
AUTO = {"color": "#b8860b", "linestyle": "-", "marker": "*", "markeredgecolor": "0.2"}
# For rungs on no list yet.
NEW = (("#CC3311", "X"), ("#117733", "p"), ("#AA3377", "<"), ("#6b6b00", ">"))
ROOFLINE = {"color": "black", "linestyle": "-", "linewidth": 2.0}
SMALL, TINY = 8, 7  # points: labels, captions
GAP = 11  # points between baselines


def look(rung: str) -> dict:
    """A rung's line style, by its number or place in its gradient, else NEW's."""
    if rung == "auto":
        return AUTO
    if rung in BESIDE:
        own = BESIDE[rung]
    elif rung in KNOWN:
        number = re.match(STEP, rung)
        step = int(number[1]) - 1 if number else PLACES[rung]
        own = {"color": LADDER[step % len(LADDER)], "marker": MARKERS[step % len(LADDER)]}
    else:
        color, marker = NEW[_new.setdefault(rung, len(_new)) % len(NEW)]
        own = {"color": color, "marker": marker}
    return {"linestyle": "-", "markeredgecolor": "0.2", **own}


def marks(of: dict) -> dict:
    return of | {"linestyle": "none"}


def label_points(axes: Axes, labels: list[tuple[tuple[float, float], str]]) -> None:
    """Write each label right of its point, above the one below."""
    axes.figure.draw_without_rendering()  # fixes places
    points = 72 / axes.figure.dpi
    below = None
    for (x, y), label in sorted(labels, key=lambda one: one[0][1]):
        at = axes.transData.transform((x, y))[1] * points
        height = at if below is None else max(at, below + GAP)
        below = height
        axes.annotate(label, (x, y), xytext=(8, height - at), textcoords="offset points", va="center", fontsize=SMALL)
