"""Whole decoders."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from numba_tconv.lab.studies.decoder_times import Timed, grouped, title

from .by_rung import milliseconds
from .style import CUDNN, SMALL, look
from .words import caption, measured_on, words

COLUMNS = 2
BAR = 0.38
THEIRS, OURS = {"color": CUDNN["color"]}, {"color": look("k6_wgmma")["color"]}
ROOM = 0.3  # for labels
INSIDE = 0.25


def decoders(timed: Iterable[Timed]) -> Figure | None:
    """Two bars a decoder, torch's and ours, in shares of torch's time, filled for transposed convolutions."""
    groups = grouped(timed)
    if not groups:
        return None
    most, columns = max(map(len, groups)), min(COLUMNS, len(groups))
    lines = -(-len(groups) // columns)
    figure = Figure(figsize=(5.6 * columns, 1.4 + lines * (0.55 + 0.5 * most)), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, squeeze=False)
    panels = grid.flat[: len(groups)]
    for axes in grid.flat[len(groups) :]:
        axes.remove()
    for axes, some in zip(panels, groups, strict=True):
        _panel(axes, some)
    for axes in panels[-columns:]:
        axes.set_xlabel("share of the whole decoder's time with torch's", fontsize=SMALL)
        axes.tick_params(labelbottom=True)
    names = {"transposed convolutions, torch's": THEIRS, "ours": OURS, "the rest of the decoder": {"color": "white"}}
    handles = [Patch(facecolor=side["color"], edgecolor="0.2") for side in names.values()]
    everything = [row for some in groups for row in some]
    said = textwrap.fill(finding(everything), 60 * columns)
    figure.legend(handles, names, loc="outside upper center", ncols=3, frameon=False, fontsize=SMALL, title=said)
    longest = max(1.0, *(row.ms_p50 / row.torch_ms_p50 for row in everything))
    panels[-1].set_xlim(0, longest + ROOM)
    versions = ", ".join(sorted({row.transformers for row in everything}))
    caption(figure, f"whole decoders of transformers {versions}, random weights; {measured_on(everything)}")
    return figure


def finding(timed: Iterable[Timed]) -> str:
    rows = [row for some in grouped(timed) for row in some]
    shares = sorted(row.torch_layers_ms_p50 / row.torch_ms_p50 for row in rows)
    gains = sorted(row.torch_ms_p50 / row.ms_p50 for row in rows)
    return (
        f"Transposed convolutions are {shares[0]:.0%} to {shares[-1]:.0%} of a decoder's time; "
        f"with ours it is {gains[0]:.2f} to {gains[-1]:.2f} times as fast"
    )


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
    axes.set_title(f"{words(first)}, {first.batch} input{'s' * (first.batch > 1)} of {first.seconds:g} s", fontsize=9)


def _bar(axes: Axes, height: float, unit: float, times: tuple[float, float], side: dict, gains=("", "")) -> None:
    """``times``: convolutions, whole, in ms; ``unit`` is drawn as 1."""
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
