"""The ladder's times."""

import re

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numba_tconv.lab.measure.rows import Row

from .chosen import arithmetics, fastest, rungs, workloads
from .style import CUDNN, ROOFLINE, SMALL, STEP, look
from .words import caption, layer, measured_on, words

WORKLOADS, PRECISIONS = ("kb64", "hifigan_u3"), ("ieee", "tf32")
HEADING = 0.9


def shown(row: Row) -> bool:
    on_ladder = re.match(STEP, row.rung) and row.dtype == "float32" and row.precision in PRECISIONS
    return bool(on_ladder) and row.workload in WORKLOADS


def ladder(rows: list[Row]) -> Figure:
    """Every rung's time, a panel for each workload, a group for each precision.

    ``rows`` have one direction and dtype, and a roofline.
    """
    names, groups = workloads(rows), arithmetics(rows)
    bars = [(key, rungs(groups[key])) for key in groups]
    height = sum(HEADING + len(of_group) for _, of_group in bars)
    figure = Figure(figsize=(7.5, 1.5 + 0.3 * height), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    ticks = []
    for axes, name in zip(panels, names, strict=True):
        of_workload = [row for row in rows if row.workload == name]
        top = 0.0
        axes.set_xscale("log")
        axes.set_xlim(0.5 * min(row.floor_ms for row in of_workload), 6 * max(row.ms_p50 for row in of_workload))
        for key, of_group in bars:
            top += HEADING
            ticks += [(top + number, rung) for number, rung in enumerate(of_group)] if axes is panels[0] else []
            _group(axes, [row for row in groups[key] if row.workload == name], of_group, top)
            top += len(of_group)
        axes.set_title(layer(name), fontsize=SMALL)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("time in ms (logarithmic)")
    marks = {name: mark for mark, name in zip(*panels[0].get_legend_handles_labels(), strict=True)}
    panels[0].legend(marks.values(), marks, loc="lower right", frameon=False, fontsize=SMALL)
    panels[0].set_ylim(height - 0.4, -0.4)
    panels[0].set_yticks(*zip(*ticks, strict=True))
    figure.suptitle(finding(rows), fontsize=9)
    caption(figure, f"{rows[0].direction}; {measured_on(rows)}")
    return figure


def finding(rows: list[Row]) -> str:
    some = [row for row in rows if row.workload == workloads(rows)[0]]
    slow, fast = max(some, key=lambda row: row.ms_p50), fastest(some)
    return (
        f"From {milliseconds(slow.ms_p50)} to {milliseconds(fast.ms_p50)} on {fast.workload}: {fast.rung} is "
        f"{slow.ms_p50 / fast.ms_p50:,.0f} times as fast as {slow.rung}"
    )


def _group(axes: Axes, rows: list[Row], names: list[str], top: float) -> None:
    if not rows:
        return
    best, left = fastest(rows), axes.get_xlim()[0]
    across = (top - 0.45, top + len(names) - 0.55)
    axes.text(1.3 * left, top - 0.55, words(best), fontsize=SMALL, va="bottom", style="italic")
    for row in rows:
        at = top + names.index(row.rung)
        axes.barh(at, row.ms_p50 - left, left=left, height=0.7, color=look(row.rung)["color"], edgecolor="0.2", lw=0.6)
        axes.annotate(
            *(milliseconds(row.ms_p50), (row.ms_p50, at)),
            **dict(xytext=(4, 0), textcoords="offset points", fontsize=SMALL, va="center", zorder=4),
            bbox=dict(facecolor="white", edgecolor="none", pad=0.5),
        )
    axes.plot([best.cudnn_ms_p50] * 2, across, **CUDNN | {"marker": ""}, zorder=3, label="cuDNN in that precision")
    axes.plot([best.floor_ms] * 2, across, **ROOFLINE, zorder=3, label="roofline of that precision")


def milliseconds(time: float) -> str:
    return f"{time:,.0f} ms" if time >= 100 else f"{time:.3g} ms"
