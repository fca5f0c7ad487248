"""The figures' style, legible in grey and for the colour-blind."""

from __future__ import annotations

import re

from numba_tconv.selection.directions import OF_GRADIENTS, rungs_of

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

# From light to dark, so the order shows in grey; markers and dashes differ too.
LADDER = ("#9ecae1", "#6baed6", "#3182bd", "#08519c", "#35208e", "#20104f")
MARKERS = "osDv^P"
STEP = r"k(\d+)_"  # start of a ladder rung's name
PLACES = {name: place for of in OF_GRADIENTS for place, name in enumerate(rungs_of(of))}
BESIDE = {"depthwise": {"color": "#009E73", "marker": "h"}}
CUDNN = {"color": "#D55E00", "linestyle": "--", "marker": "x"}
CONV1D = {"color": "#8f5a83", "linestyle": ":", "marker": "+"}
ROOFLINE = {"color": "black", "linestyle": "-", "linewidth": 2.0}
SMALL, TINY = 8, 7  # points: labels, captions


def look(rung: str) -> dict:
    """A rung's line style, by the number in its name or its place in its gradient; the darkest for others."""
    number = re.match(STEP, rung)
    step = int(number[1]) - 1 if number else PLACES.get(rung, len(LADDER) - 1)
    own = {"color": LADDER[step % len(LADDER)], "marker": MARKERS[step % len(LADDER)]}
    return {"linestyle": "-", "markeredgecolor": "0.2", **BESIDE.get(rung, own)}


def marks(of: dict) -> dict:
    return of | {"linestyle": "none"}
