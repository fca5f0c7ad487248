"""Whole decoders by mode."""

import textwrap
from collections.abc import Iterable
from statistics import geometric_mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from numba_tconv.lab.measure.rows import grouped, of_main_gpu
from numba_tconv.lab.studies.decoder_modes import Timed, newest
from numba_tconv.lab.studies.decoders import title

from .style import CUDNN, SMALL, TINY, look, marks
from .words import caption, measured_on

COLUMNS = 4
LINE = 0.19  # inches
THEIRS, OURS = marks(CUDNN) | {"marker": "o"}, marks(look("k6_wgmma"))
LABELS = {"float32": "TF32", "bfloat16": "bf16"}


def decoders(timed: Iterable[Timed]) -> Figure | None:
    """A panel a decoder, a line a mode: torch's time and ours, the factor at the right."""
    panels = grouped(_alike(timed), lambda row: row.decoder)
    if not panels:
        return None
    columns = min(COLUMNS, len(panels))
    lines, most = -(-len(panels) // columns), max(map(len, panels.values()))
    figure = Figure(figsize=(max(6.0, 3.3 * columns), 1.4 + lines * (0.7 + LINE * most)), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, squeeze=False)
    labels: list[str] = []
    for place, (axes, rows) in enumerate(zip(grid.flat, panels.values(), strict=False)):
        before, labels = labels, _panel(axes, rows)
        axes.tick_params(labelleft=place % columns == 0 or labels != before)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes in grid.flat[: len(panels)][-columns:]:
        axes.set_xlabel("ms (logarithmic); at the right: times as fast", fontsize=SMALL)
        axes.tick_params(labelbottom=True)
    everything = [row for rows in panels.values() for row in rows]
    said = textwrap.fill(finding(everything), 38 * columns)
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False,
                  fontsize=SMALL, title=said)  # fmt: skip
    seconds = f"{everything[0].seconds:g} s of sound an input"
    caption(figure, f"random weights, frozen; {seconds}; {measured_on(everything)}")
    return figure


def finding(timed: Iterable[Timed]) -> str:
    parts = []
    for has_activations, rows in sorted(grouped(_alike(timed), lambda row: row.activations > 0).items(), reverse=True):
        gains = sorted(row.torch_ms_p50 / row.ms_p50 for row in rows)
        which = "with alias-free activations" if has_activations else "without"
        parts.append(f"{geometric_mean(gains):.1f} ({gains[0]:.2f} to {gains[-1]:.2f}) {which}")
    return "Whole decoders against torch's, times as fast: " + ", ".join(parts)


def _alike(timed: Iterable[Timed]) -> list[Timed]:
    groups = grouped(newest(of_main_gpu(timed)), lambda row: row.seconds)
    return max(groups.values(), key=len, default=[])


def _panel(axes: Axes, rows: list[Timed]) -> list[str]:
    """The lines' labels."""
    heights = range(len(rows))
    torchs, ours = [row.torch_ms_p50 for row in rows], [row.ms_p50 for row in rows]
    axes.hlines(heights, ours, torchs, color="0.75", lw=2.5)
    axes.plot(torchs, heights, **THEIRS, markersize=5, label="torch")
    axes.plot(ours, heights, **OURS, markersize=6, label="ours")
    for height, row in zip(heights, rows, strict=True):
        axes.annotate(f"{row.torch_ms_p50 / row.ms_p50:.2f}x", (1.01, height), xycoords=axes.get_yaxis_transform(),
                      fontsize=TINY, va="center", annotation_clip=False)  # fmt: skip
    labels = [f"{LABELS.get(row.dtype, row.dtype)}, {row.batch} x, {row.mode}" for row in rows]
    axes.set_yticks(heights, labels, fontsize=TINY)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=TINY)
    axes.grid(axis="y", visible=False)
    axes.set_title(title(rows[0].decoder), fontsize=SMALL)
    return labels
