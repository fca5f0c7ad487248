"""Whole decoders and the share of their transposed convolutions."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from numba_tconv.lab.studies.decoder_times import Timed, grouped, title

from .by_rung import milliseconds
from .style import CUDNN, SMALL, look
from .words import caption, measured_on, words

BAR = 0.38  # height, of a decoder's 1
THEIRS, OURS = {"color": CUDNN["color"]}, {"color": look("k6_wgmma")["color"]}
ROOM = 0.3  # for labels behind the longest bar, in torch's time
INSIDE = 0.25  # for the convolutions' label, likewise


def decoders(timed: Iterable[Timed]) -> Figure | None:
    """A pair of bars for each decoder, torch's above ours, in shares of torch's time, filled for the transposed
    convolutions; a panel for each dtype and input size. None without rows."""
    groups = grouped(timed)
    if not groups:
        return None
    most = max(map(len, groups))
    figure = Figure(figsize=(7.5, 1.3 + len(groups) * (0.55 + 0.5 * most)), layout="constrained")
    panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False)[:, 0]
    for axes, some in zip(panels, groups, strict=True):
        _panel(axes, some)
    panels[-1].set_xlabel("share of the whole decoder's time with torch's transposed convolutions")
    names = {"transposed convolutions, torch's": THEIRS, "ours": OURS, "the rest of the decoder": {"color": "white"}}
    handles = [Patch(facecolor=side["color"], edgecolor="0.2") for side in names.values()]
    figure.legend(handles, names, loc="outside upper center", ncols=3, frameon=False, fontsize=SMALL)
    everything = [row for some in groups for row in some]
    longest = max(1.0, *(row.ms_p50 / row.torch_ms_p50 for row in everything))
    panels[-1].set_xlim(0, longest + ROOM)  # shared
    versions = ", ".join(sorted({row.transformers for row in everything}))
    caption(figure, f"whole decoders of transformers {versions}, random weights; {measured_on(everything)}")
    return figure


def _panel(axes: Axes, rows: list[Timed]) -> None:
    for place, row in enumerate(rows):
        unit = row.torch_ms_p50
        _bar(axes, place - BAR / 2, unit, (row.torch_layers_ms_p50, unit), THEIRS)
        layers, whole = row.torch_layers_ms_p50 / row.layers_ms_p50, unit / row.ms_p50
        gains = f" ({layers:.2f}x)", f" ({whole:.2f}x)"
        _bar(axes, place + BAR / 2, unit, (row.layers_ms_p50, row.ms_p50), OURS, gains)
    axes.set_yticks(range(len(rows)), [title(row.decoder) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=False)
    first = rows[0]
    axes.set_title(f"{words(first)}, {first.batch} inputs of {first.seconds:g} s", fontsize=9)


def _bar(axes: Axes, height: float, unit: float, times: tuple[float, float], side: dict, gains=("", "")) -> None:
    """A bar at ``height``, filled for the convolutions; ``times`` (convolutions, whole) in ms, ``unit`` drawn as 1."""
    layers, whole = (time / unit for time in times)
    box = dict(height=BAR, edgecolor=side["color"], linewidth=0.8)
    axes.barh(height, layers, color=side["color"], **box)
    axes.barh(height, whole - layers, left=layers, color="white", **box)
    outside = whole - layers > INSIDE
    labels = [milliseconds(time) + gain for time, gain in zip(times, gains, strict=True)]
    where = dict(textcoords="offset points", fontsize=SMALL, va="center_baseline")
    axes.annotate(labels[0], (layers, height), xytext=(4 if outside else -4, 0), **where,
                  ha="left" if outside else "right", color="black" if outside else "white")  # fmt: skip
    axes.annotate(labels[1], (whole, height), xytext=(4, 0), **where)
