"""Throughput against arithmetic intensity."""

import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numba_tconv.formula.problem import COPY_BANDWIDTH, PEAK_FLOPS
from numba_tconv.lab.measure.bench import DTYPES, peak_name
from numba_tconv.lab.measure.rows import Row

from .chosen import arithmetics, fastest, marked, rungs, workloads
from .style import CUDNN, ROOFLINE, SMALL, TINY, look, marks
from .words import caption, measured_on, words

COLUMNS = 2
NAMES = 25.0  # factor below the slowest mark, for names
NAME_GAP = 0.07  # between names, in widths


def intensity(rows: list[Row]) -> Figure:
    """TFLOP/s against FLOPs per byte of minimum traffic; a panel for each dtype and precision."""
    groups = arithmetics(rows)
    lines = -(-len(groups) // COLUMNS)
    figure = Figure(figsize=(7.5, 0.9 + 3.0 * lines), layout="constrained")
    panels = figure.subplots(lines, min(COLUMNS, len(groups)), sharex=True, sharey=True, squeeze=False)
    per_byte = [_per_byte(row) for row in rows]
    span = min(per_byte) / 1.6, max(per_byte) * 1.6
    slowest = min(min(row.tflops, row.tflops * row.ms_p50 / row.cudnn_ms_p50) for row in rows)
    heights = slowest / NAMES, 2.0 * max(_peak(some) for some in groups.values()) / 1e12
    for axes, some in zip(panels.flat, groups.values(), strict=False):
        _panel(axes, some, span, heights)
    for axes in panels.flat[len(groups) :]:
        axes.set_visible(False)
    names = {name: mark for axes in panels.flat for mark, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    shown = sorted(names, key=lambda name: (name == "cuDNN", name))
    figure.legend(
        *([names[name] for name in shown], shown),
        **dict(
            loc="outside upper center", ncols=5, frameon=False, fontsize=SMALL, title=textwrap.fill(finding(rows), 100)
        ),
    )
    caption(figure, f"{rows[0].direction}; {measured_on(rows)}")
    return figure


def finding(rows: list[Row]) -> str:
    said: dict[str, list[str]] = {}
    for some in arithmetics(rows).values():
        per_byte = {row.workload: _per_byte(row) for row in some}
        bound = sum(one < _peak(some) / COPY_BANDWIDTH for one in per_byte.values())
        said.setdefault(f"{bound} of {len(per_byte)} layers", []).append(words(some[0]))
    parts = [f"{layers} in {', '.join(names)}" for layers, names in said.items()]
    return f"Memory bounds {'; '.join(sorted(parts, key=lambda part: -int(part.split()[0])))}"


def _panel(axes: Axes, rows: list[Row], span: tuple[float, float], heights: tuple[float, float]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    _roofs(axes, _peak(rows), span)
    shown = marked(rows)
    for rung in rungs(shown):
        points = [(_per_byte(row), row.tflops) for row in shown if row.rung == rung]
        axes.plot(*zip(*points, strict=True), **marks(look(rung)), markersize=4.5, markeredgewidth=0.5, label=rung)
    best = {name: fastest(row for row in rows if row.workload == name) for name in workloads(rows)}
    theirs = [(_per_byte(row), row.tflops * row.ms_p50 / row.cudnn_ms_p50) for row in best.values()]
    axes.plot(*zip(*theirs, strict=True), **marks(CUDNN), markersize=4.5, label="cuDNN")
    axes.set_xlim(*span)
    axes.set_ylim(*heights)
    axes.set_title(words(rows[0]), fontsize=9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set_xlabel("FLOP / byte of minimum traffic")
    axes.set_ylabel("TFLOP/s")
    axes.label_outer()
    _name_columns(axes, {name: _per_byte(row) for name, row in best.items()})


def _roofs(axes: Axes, peak: float, span: tuple[float, float]) -> None:
    ridge = peak / COPY_BANDWIDTH
    corners = [span[0], min(max(ridge, span[0]), span[1]), span[1]]
    axes.plot(corners, [min(x * COPY_BANDWIDTH, peak) / 1e12 for x in corners], **ROOFLINE)
    if ridge > span[0]:
        middle = (span[0] * corners[1]) ** 0.5
        axes.annotate(
            *(f"{COPY_BANDWIDTH / 1e12:g} TB/s", (middle, middle * COPY_BANDWIDTH / 1e12)),
            **dict(xytext=(-3, 3), textcoords="offset points", fontsize=SMALL, va="bottom", ha="right"),
        )
    if ridge < span[1]:
        axes.annotate(
            *(f"{peak / 1e12:g} TFLOP/s", (span[1], peak / 1e12)),
            **dict(xytext=(-3, 3), textcoords="offset points", fontsize=SMALL, va="bottom", ha="right"),
        )


def _name_columns(axes: Axes, columns: dict[str, float]) -> None:
    to_axes, named = axes.get_xaxis_transform(), []
    for name, x in columns.items():
        place = axes.transAxes.inverted().transform(axes.transData.transform((x, 1)))[0]
        if all(abs(place - other) > NAME_GAP for other in named):
            named.append(place)
            axes.text(x, 0.015, name, transform=to_axes, rotation=90, fontsize=TINY, ha="center", color="0.35")


def _per_byte(row: Row) -> float:
    return 1e3 * row.tflops / row.gbps


def _peak(rows: list[Row]) -> float:
    return PEAK_FLOPS[peak_name(DTYPES[rows[0].dtype], rows[0].precision)]
