"""Each rung's share of the roofline, on two workloads."""

from __future__ import annotations

import re

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from numba_tconv.lab.measure.rows import Row

from .chosen import arithmetics, fastest, rungs, workloads
from .style import CUDNN, ROOFLINE, SMALL, STEP, look
from .words import caption, layer, measured_on, words

WORKLOADS, PRECISIONS = ("kb64", "hifigan_u3"), ("ieee", "tf32")
ROOM = 0.77  # longer bars have their time inside
HEADING = 0.9  # height, of a bar's 1


def shown(row: Row) -> bool:
    """Whether the row is of a ladder rung in float32, on one of WORKLOADS."""
    on_ladder = re.match(STEP, row.rung) and row.dtype == "float32" and row.precision in PRECISIONS
    return bool(on_ladder) and row.workload in WORKLOADS


def ladder(rows: list[Row]) -> Figure:
    """Bars of every rung's speed, a panel for each workload and a group for each precision.

    Lengths are shares of the roofline with the least floor time, so groups compare. Lines mark each group's roofline
    and cuDNN. ``rows`` are of one direction and dtype, and have a roofline.
    """
    names, groups = workloads(rows), arithmetics(rows)
    bars = [(key, rungs(groups[key])) for key in groups]
    height = sum(HEADING + len(of_group) for _, of_group in bars)
    figure = Figure(figsize=(7.5, 1.5 + 0.33 * height), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    ticks = []
    for axes, name in zip(panels, names, strict=True):
        of_workload = [row for row in rows if row.workload == name]
        reference = min(of_workload, key=lambda row: row.floor_ms)
        top = 0.0
        for key, of_group in bars:
            top += HEADING
            ticks += [(top + number, rung) for number, rung in enumerate(of_group)] if axes is panels[0] else []
            _group(axes, [row for row in groups[key] if row.workload == name], of_group, reference.floor_ms, top)
            top += len(of_group)
        axes.set_title(layer(name), fontsize=SMALL)
        axes.set_xlim(0, 1.02)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"share of the roofline in {words(reference)}\n({milliseconds(reference.floor_ms)} / time)")
    lines = {name: mark for axes in panels for mark, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines, loc="outside upper center", ncols=2, frameon=False, fontsize=SMALL)
    panels[0].set_ylim(height - 0.4, -0.4)
    panels[0].set_yticks(*zip(*ticks, strict=True))
    caption(figure, f"{rows[0].direction}; {measured_on(rows)}")
    return figure


def _group(axes: Axes, rows: list[Row], names: list[str], floor: float, top: float) -> None:
    if not rows:
        return
    best = fastest(rows)
    across = (top - 0.45, top + len(names) - 0.55)
    theirs = floor / best.cudnn_ms_p50
    said = f"{words(best)}: roofline {milliseconds(best.floor_ms)}, cuDNN {milliseconds(best.cudnn_ms_p50)}"
    axes.text(0.01, top - 0.55, said, fontsize=SMALL, va="bottom", style="italic")
    for row in rows:
        at, share = top + names.index(row.rung), floor / row.ms_p50
        axes.barh(at, share, height=0.72, color=look(row.rung)["color"], edgecolor="0.2", linewidth=0.6)
        inside = share > ROOM
        axes.annotate(
            *(milliseconds(row.ms_p50), (share if inside else 1, at)),
            **dict(xytext=(-5, 0), textcoords="offset points", fontsize=SMALL, va="center", ha="right"),
            color="white" if inside else "black",
        )
    axes.plot([theirs] * 2, across, **CUDNN | {"marker": ""}, zorder=3, label="cuDNN in that precision")
    axes.plot(
        [floor / best.floor_ms] * 2, across, **ROOFLINE, zorder=3, clip_on=False, label="roofline of that precision"
    )


def milliseconds(time: float) -> str:
    """ms with three significant digits, whole from 100 on."""
    return f"{time:,.0f} ms" if time >= 100 else f"{time:.3g} ms"
