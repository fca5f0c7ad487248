"""Figures, drawn from rows and from nothing else, in one style that survives printing in grey."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from .directions import FORWARD, OF_GRADIENTS, STEP, rungs_of
from .rows import Row, RowsError, latest
from .workloads import WORKLOADS

STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "axes.axisbelow": True,
    "figure.dpi": 150,
    "svg.fonttype": "none",
    "svg.hashsalt": "numba_tconv",  # the same rows give the same file
}

# The ladder runs from light to dark, so its order is seen in grey too; markers and dashes tell the lines apart as well.
LADDER = ("#9ecae1", "#6baed6", "#3182bd", "#08519c", "#35208e", "#20104f")
MARKERS = "osDv^P"
PLACES = {name: place for of in OF_GRADIENTS for place, name in enumerate(rungs_of(of))}
CUDNN = {"color": "#D55E00", "linestyle": "--", "marker": "x"}
CONV1D = {"color": "#8f5a83", "linestyle": ":", "marker": "+"}
ROOFLINE = {"color": "black", "linestyle": "-", "linewidth": 2.0}
LABEL_GAP = 11  # points between the baselines of two labels


def draw_all(rows: Iterable[Row], directory: str | os.PathLike, live: Iterable[Row] = ()) -> list[Path]:
    """Draw every figure that ``rows`` give, as SVG and PNG in ``directory``; the paths written.

    One figure of throughput against length for each sweep, one of the shares of the roofline for each direction, dtype
    and precision measured at full size. ``live`` rows are drawn beside the recorded ones, with hollow markers. Raises
    RowsError where a file cannot be written.
    """
    recorded, fresh = list(latest(rows).values()), list(latest(live).values())
    figures: dict[str, Figure] = {}
    with matplotlib.rc_context(STYLE):
        for (workload, *what), some in _grouped(recorded + fresh, _sweep).items():
            name = f"throughput_{workload.replace('@', '_')}_{_suffix(*what)}"
            live_here = [row for row in some if row in fresh]
            figures[name] = throughput([row for row in some if row not in live_here], live_here)
        for what, some in _grouped(recorded, _full_size).items():
            figures[f"roofline_{_suffix(*what)}"] = shares(some)
        return [path for name, figure in figures.items() for path in _save(figure, Path(directory), name)]


def throughput(rows: list[Row], live: list[Row] = ()) -> Figure:
    """Throughput against length: GB/s of minimum traffic on the left, TFLOP/s on the right, for one sweep."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _throughput_panel(left, rows, live, lambda row: row.gbps, "GB/s (minimum traffic / time)")
    _throughput_panel(right, rows, live, lambda row: row.tflops, "TFLOP/s")
    first = (rows or live)[0]
    workload, _, fixed = first.workload.partition("@")
    held = "batch x length fixed" if fixed == "total" else f"batch {fixed.removeprefix('batch')}"
    figure.suptitle(f"{_layer(workload)}, {held}, {first.direction}, {_words(first)}", fontsize=10)
    figure.supxlabel(_caption(rows, live), fontsize=7, color="0.25")
    return figure


def shares(rows: list[Row]) -> Figure:
    """The share of the roofline that each rung, cuDNN and conv1d reach, a line of marks for each workload."""
    rows = [row for row in rows if row.roofline is not None]
    present = {row.workload for row in rows}
    names = [name for name in WORKLOADS if name in present] + sorted(present - set(WORKLOADS))
    figure = Figure(figsize=(7.5, 1.5 + 0.42 * len(names)), layout="constrained")
    axes = figure.subplots()
    for rung in _rungs(rows):
        of_rung = [row for row in rows if row.rung == rung]
        _marks(axes, [(names.index(row.workload), row.roofline) for row in of_rung], rung, _style(rung))
    best = [min((row for row in rows if row.workload == name), key=lambda row: row.ms_p50) for name in names]
    theirs = [(i, row.floor_ms / row.cudnn_ms_p50) for i, row in enumerate(best)]
    _marks(axes, theirs, "cuDNN", CUDNN)
    _marks(axes, [(i, r.floor_ms / r.conv1d_ms_p50) for i, r in enumerate(best) if r.conv1d_ms_p50], "conv1d", CONV1D)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("share of the roofline (floor time / time)")
    figure.legend(loc="outside upper center", ncols=6, frameon=False, fontsize=8)
    if rows:
        figure.supxlabel(f"{rows[0].direction}, {_words(rows[0])}; {_caption(rows)}", fontsize=7, color="0.25")
    return figure


# --- parts ------------------------------------------------------------------------------------------------------------


def _throughput_panel(axes: Axes, rows: list[Row], live: list[Row], value: Callable[[Row], float], unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    labels = []

    def line(points, label, style):
        points = sorted(points)
        if points:
            axes.plot(*zip(*points, strict=True), markersize=4.5, **style)
            labels.append((points[-1], label))

    for rung in _rungs(rows):
        line([(row.length, value(row)) for row in rows if row.rung == rung], rung, _style(rung))
    for rung in _rungs(live):
        style = _style(rung) | {"linestyle": "-.", "markerfacecolor": "white"}
        line([(row.length, value(row)) for row in live if row.rung == rung], f"{rung}, live", style)
    # cuDNN, conv1d and the roofline of a length are taken from the run of the fastest row of that length.
    best = {}
    for row in sorted(rows or live, key=lambda row: -row.ms_p50):
        best[row.length] = row
    line([(n, value(r) * r.ms_p50 / r.cudnn_ms_p50) for n, r in best.items()], "cuDNN", CUDNN)
    line([(n, value(r) * r.ms_p50 / r.conv1d_ms_p50) for n, r in best.items() if r.conv1d_ms_p50], "conv1d", CONV1D)
    line([(n, value(r) / r.roofline) for n, r in best.items() if r.roofline], "roofline", ROOFLINE)
    axes.set_xlabel("length (samples)")
    axes.set_ylabel(unit)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _label_ends(axes, labels)


def _label_ends(axes: Axes, labels: list[tuple[tuple[float, float], str]]) -> None:
    """Write each label to the right of its line's end, moved up where it would cover the one below."""
    axes.figure.draw_without_rendering()  # the layout decides where the ends are
    points = 72 / axes.figure.dpi
    below = None
    for (x, y), label in sorted(labels, key=lambda one: one[0][1]):
        end = axes.transData.transform((x, y))[1] * points
        height = end if below is None else max(end, below + LABEL_GAP)
        below = height
        axes.annotate(label, (x, y), xytext=(8, height - end), textcoords="offset points", va="center", fontsize=8)


def _marks(axes: Axes, points: list[tuple[int, float]], label: str, style: dict) -> None:
    if points:
        heights, values = zip(*points, strict=True)
        axes.plot(values, heights, **(style | {"linestyle": "none"}), markersize=7, label=label, clip_on=False)


def _style(rung: str) -> dict:
    """The look of a rung, by the number in its name or its place among the rungs of its gradient; the darkest for a
    name without either."""
    number = re.match(r"k(\d+)_", rung)
    step = int(number[1]) - 1 if number else PLACES.get(rung, len(LADDER) - 1)
    return {
        "color": LADDER[step % len(LADDER)],
        "linestyle": "-",
        "marker": MARKERS[step % len(LADDER)],
        "markeredgecolor": "0.2",
    }


def _rungs(rows: list[Row]) -> list[str]:
    """What is drawn of ``rows``, by name."""
    return sorted({row.rung for row in rows if _drawn(row)})


def _drawn(row: Row) -> bool:
    """Whether the row has a mark of its own: what the selection picked is one of the rungs and is not drawn again, but
    for a step, which is computed by several."""
    return row.rung != "cudnn" and (row.rung != "auto" or row.direction == STEP)


def _sweep(row: Row) -> tuple | None:
    drawn = "@" in row.workload and _drawn(row)
    return (row.workload, row.direction, row.dtype, row.precision) if drawn else None


def _full_size(row: Row) -> tuple | None:
    drawn = "@" not in row.workload and row.roofline is not None
    return (row.direction, row.dtype, row.precision) if drawn else None


def _grouped(rows: list[Row], key: Callable[[Row], tuple | None]) -> dict[tuple, list[Row]]:
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if (group := key(row)) is not None:
            groups.setdefault(group, []).append(row)
    return groups


def _arithmetic(dtype: str, precision: str) -> str:
    return dtype if dtype == precision else f"{dtype}_{precision}"


def _suffix(direction: str, dtype: str, precision: str) -> str:
    """What the name of a figure ends with; the forward pass goes without saying."""
    return "_".join([*([] if direction == FORWARD else [direction]), _arithmetic(dtype, precision)])


def _words(row: Row) -> str:
    return _arithmetic(row.dtype, row.precision).replace("_", " ")


def _layer(workload: str) -> str:
    """The workload with its channels and taps."""
    if workload not in WORKLOADS:
        return workload
    p = WORKLOADS[workload].problem
    return f"{workload}'s {p.in_channels}->{p.out_channels} channels, {p.kernel_size} taps, stride {p.stride}"


def _caption(rows: list[Row], live: Iterable[Row] = ()) -> str:
    """GPU, driver, versions and date, of the recorded and of the live rows."""
    parts = []
    for label, some in (("", rows), ("live: ", list(live))):
        if some:
            newest = max(some, key=lambda row: row.time)
            versions = f"driver {newest.driver}, torch {newest.torch}, cuDNN {newest.cudnn}"
            parts.append(f"{label}{newest.gpu}, {versions}, {newest.time[:10]}")
    return "; ".join(parts)


def _save(figure: Figure, directory: Path, name: str) -> list[Path]:
    written = []
    for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
        path = directory / f"{name}.{kind}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata=metadata)
        except OSError as error:
            raise RowsError(f"cannot write {path}: {error.strerror}") from error
        written.append(path)
    return written
