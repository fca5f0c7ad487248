"""Figures."""

import io
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure

from numba_tconv.lab.measure.rows import Row, latest, of_main_gpu, replace_bytes
from numba_tconv.lab.measure.search import RUNG, Tried
from numba_tconv.lab.studies.decoder_modes import Timed
from numba_tconv.runtime.progress import progress
from numba_tconv.selection.directions import FORWARD

from . import by_decoder, by_intensity, by_precision, by_prediction, by_rung, by_workload, chosen
from .by_decoder import decoders
from .by_intensity import intensity
from .by_length import finding, throughput
from .by_precision import errors
from .by_prediction import predicted
from .by_rung import ladder
from .by_workload import shares
from .style import STYLE
from .words import arithmetic, name_of

__all__ = [
    *("STYLE", "Plan", "decoders", "draw_all", "errors", "intensity", "ladder", "plans", "predicted", "shares"),
    "throughput",
]


class Plan(NamedTuple):
    """A figure's title and drawing function."""

    title: str
    draw: Callable[[], Figure | None]


def draw_all(
    rows: Iterable[Row],
    directory: str | os.PathLike,
    live: Iterable[Row] = (),
    searched: Iterable[Tried] = (),
    timed: Iterable[Timed] = (),
) -> list[Path]:
    """Draw ``plans`` as SVG and PNG; returns changed files. Raises RowsError where one cannot be written."""
    with matplotlib.rc_context(STYLE):
        planned = plans(rows, live, searched, timed)
        drawn = ((name, plan.draw()) for name, plan in progress(planned.items(), "figures", len(planned)))
        return [path for name, figure in drawn if figure for path in _save(figure, Path(directory), name)]


def plans(
    rows: Iterable[Row],
    live: Iterable[Row] = (),
    searched: Iterable[Tried] = (),
    timed: Iterable[Timed] = (),
) -> dict[str, Plan]:
    """Figures for the GPU with most rows, by file name.

    ``live`` rows join the curves over length, with hollow markers. ``searched`` gives the figure of predictions,
    ``timed`` of decoders.
    """
    recorded, fresh, searched, timed = list(latest(of_main_gpu(rows)).values()), list(live), list(searched), list(timed)
    planned = _sweeps(recorded, list(latest(fresh).values())) | _at_full_size(recorded)
    if known := by_prediction.pairs(tuple(searched)):
        planned[f"predicted_{RUNG}"] = Plan(by_prediction.finding(known), partial(predicted, searched))
    if timed:
        planned["decoders"] = Plan(by_decoder.finding(timed), partial(decoders, timed))
    return planned


def _sweeps(recorded: list[Row], live: list[Row]) -> dict[str, Plan]:
    def key(row):
        fixed = row.workload.partition("@")[2]
        known = fixed.startswith("batch") and chosen.drawn(row)
        return (fixed, row.direction, row.dtype, row.precision) if known else None

    planned = {}
    groups, groups_live = chosen.grouped(recorded, key), chosen.grouped(live, key)
    for group in groups | groups_live:
        some, fresh = groups.get(group, []), groups_live.get(group, [])
        lengths: dict[str, set[int]] = {}
        for row in (*some, *fresh):
            lengths.setdefault(row.workload, set()).add(row.length)
        some, fresh = ([row for row in of if len(lengths[row.workload]) > 1] for of in (some, fresh))
        if some or fresh:
            fixed, direction, *what = group
            name = name_of(f"throughput_{fixed}", direction, arithmetic(*what))
            planned[name] = Plan(finding([*some, *fresh]), partial(throughput, some, fresh))
    return planned


def _at_full_size(recorded: list[Row]) -> dict[str, Plan]:
    planned = {}
    some = [row for row in recorded if chosen.at_full_size(row)]
    for (direction, *what), rows in chosen.grouped(some, lambda row: (row.direction, row.dtype, row.precision)).items():
        name = name_of("roofline", direction, arithmetic(*what))
        planned[name] = Plan(by_workload.finding(rows), partial(shares, rows))
    if some:
        planned["errors"] = Plan(by_precision.finding(some), partial(errors, some))
    if forward := [row for row in some if row.direction == FORWARD]:
        planned["intensity"] = Plan(by_intensity.finding(forward), partial(intensity, forward))
    if steps := [row for row in some if row.direction == FORWARD and by_rung.shown(row)]:
        planned["ladder_float32"] = Plan(by_rung.finding(steps), partial(ladder, steps))
    return planned


def _save(figure: Figure, directory: Path, name: str) -> list[Path]:
    written = []
    for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
        content = io.BytesIO()
        figure.savefig(content, format=kind, metadata=metadata)
        path = directory / f"{name}.{kind}"
        if replace_bytes(path, content.getvalue()):
            written.append(path)
    return written
