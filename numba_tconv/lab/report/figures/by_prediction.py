"""k6's cost model against the search."""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numba_tconv.kernels.k6_wgmma.choose import choose_whole, cost
from numba_tconv.kernels.k6_wgmma.tile import configs
from numba_tconv.lab.measure.search import RUNG, Tried, is_of
from numba_tconv.lab.measure.workloads import WORKLOADS
from numba_tconv.runtime.device import H200

from .chosen import grouped
from .style import ROOFLINE, SMALL, label_points, look, marks
from .words import caption

OTHER = {"color": "0.75", "marker": ".", "linestyle": "none"}
FAR = 1.35  # choices further off are named
NEAR = 1.05  # choices this near the fastest are good


class Pair(NamedTuple):
    """Predicted ms without launch overhead, and whether the rung takes the configuration."""

    measured: Tried
    expected: float
    taken: bool


def predicted(tried: Iterable[Tried]) -> Figure | None:
    """Predicted against measured ms, a panel a precision; None without."""
    known = pairs(tuple(tried))
    if not known:
        return None
    groups = grouped(known, lambda one: (one.measured.precision,))
    figure = Figure(figsize=(7.5, 3.5), layout="constrained")
    panels = figure.subplots(1, len(groups), sharex=True, sharey=True, squeeze=False)[0]
    times = [ms for one in known for ms in (one.measured.ms_p50, one.expected)]
    span = min(times) / 1.5, max(times) * 1.5
    for axes, (precision,) in zip(panels, groups, strict=True):
        _panel(axes, groups[precision,], span)
        axes.set_title(precision, fontsize=9)
        axes.set_xlabel("measured, ms (logarithmic)")
        axes.label_outer()
    panels[0].set_ylabel("predicted without the launch, ms")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=3, frameon=False, fontsize=SMALL, title=finding(known))
    measured = [one.measured for one in known]
    newest = max(measured, key=lambda one: one.time)
    caption(figure, f"{RUNG}, every configuration; {newest.gpu}, {newest.time[:10]}")
    return figure


def finding(known: list[Pair]) -> str:
    searches = grouped(known, lambda one: (one.measured.workload, one.measured.precision)).values()
    fastest = [min(one.measured.ms_p50 for one in some) for some in searches]
    chosen = [min((one.measured.ms_p50 for one in some if one.taken), default=None) for some in searches]
    ratios = [ms / best for ms, best in zip(chosen, fastest, strict=True) if ms]
    near = sum(ratio <= NEAR for ratio in ratios)
    return f"k6's cost model takes a tile within {NEAR - 1:.0%} of the fastest in {near} of {len(ratios)} searches"


@cache
def pairs(tried: tuple[Tried, ...]) -> list[Pair]:
    found = []
    for (name, precision), some in grouped(tried, lambda one: (one.workload, one.precision)).items():
        if name in WORKLOADS:
            problem = WORKLOADS[name].problem
            taken = choose_whole(problem, precision)
            for config in configs(problem, precision):
                expected = cost(problem, config, H200)
                found += [Pair(one, expected, config == taken) for one in some if is_of(one, config)]
    return found


def _panel(axes: Axes, known: list[Pair], span: tuple[float, float]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.plot(span, span, **ROOFLINE | {"linewidth": 1.0}, label="predicted = measured")
    for taken, style, label in ((False, OTHER, "other configurations"), (True, look(RUNG), "the one that is taken")):
        points = [(one.measured.ms_p50, one.expected) for one in known if one.taken == taken]
        if points:
            axes.plot(*zip(*points, strict=True), **marks(style), markersize=4.5, label=label)
    axes.set_xlim(*span)
    axes.set_ylim(*span)
    axes.set_aspect("equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    off = [one for one in known if one.taken and not 1 / FAR < one.measured.ms_p50 / one.expected < FAR]
    label_points(axes, [((one.measured.ms_p50, one.expected), one.measured.workload) for one in off])
