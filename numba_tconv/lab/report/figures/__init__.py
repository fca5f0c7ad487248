"""Figures in one style, drawn from rows alone."""

from __future__ import annotations

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
from numba_tconv.lab.measure.workloads import WORKLOADS
from numba_tconv.lab.studies.decoder_times import Timed
from numba_tconv.runtime.progress import progress
from numba_tconv.selection.directions import FORWARD, STEP

from . import by_rung, chosen
from .by_decoder import decoders
from .by_intensity import intensity
from .by_length import throughput
from .by_precision import errors
from .by_prediction import predicted
from .by_rung import ladder
from .by_workload import shares
from .style import STYLE
from .words import arithmetic, name_of, title_of

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
    """Draw every figure of ``plans`` as SVG and PNG; returns paths of changed files. Raises RowsError where one cannot
    be written."""
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
    """The figures that the rows of the GPU with the most allow, by file name.

    * throughput against length for each sweep; ``live`` rows have hollow markers
    * the ladder
    * shares of the roofline for each direction, dtype and precision at full size
    * errors, and throughput against intensity (but for steps), for each direction
    * predictions for ``searched`` configurations
    * the decoders that were ``timed``
    """
    recorded, fresh, searched, timed = list(latest(of_main_gpu(rows)).values()), list(live), list(searched), list(timed)
    planned = _sweeps(recorded, list(latest(fresh).values())) | _at_full_size(recorded)
    if any(one.workload in WORKLOADS for one in searched):
        title = "What k6's cost model predicts of each configuration, against the search that measured it"
        planned[f"predicted_{RUNG}"] = Plan(title, partial(predicted, searched))
    if timed:
        planned["decoders"] = Plan("Whole decoders with torch's layers and with ours", partial(decoders, timed))
    return planned


def _sweeps(recorded: list[Row], live: list[Row]) -> dict[str, Plan]:
    def key(row):
        shown = chosen.swept(row) and chosen.drawn(row)
        return (row.workload, row.direction, row.dtype, row.precision) if shown else None

    planned = {}
    groups, groups_live = chosen.grouped(recorded, key), chosen.grouped(live, key)
    for group in groups | groups_live:
        if len({row.length for row in (*groups.get(group, ()), *groups_live.get(group, ()))}) == 1:
            continue  # no sweep
        workload, direction, *what = group
        name = name_of(f"throughput_{workload.replace('@', '_')}", direction, arithmetic(*what))
        name_of_layer, _, fixed = workload.partition("@")
        held = "batch x length fixed" if fixed == "total" else f"batch {fixed.removeprefix('batch')}"
        title = title_of(f"Throughput of {name_of_layer}'s channels against length, {held}", direction, *what)
        planned[name] = Plan(title, partial(throughput, groups.get(group, []), groups_live.get(group, [])))
    return planned


def _at_full_size(recorded: list[Row]) -> dict[str, Plan]:
    planned = {}
    some = [row for row in recorded if chosen.at_full_size(row)]
    for (direction, *what), rows in chosen.grouped(some, lambda row: (row.direction, row.dtype, row.precision)).items():
        title = title_of("Share of the roofline, layer by layer", direction, *what)
        planned[name_of("roofline", direction, arithmetic(*what))] = Plan(title, partial(shares, rows))
    for (direction,), rows in chosen.grouped(some, lambda row: (row.direction,)).items():
        title = title_of("Errors against float64", direction)
        planned[name_of("errors", direction)] = Plan(title, partial(errors, rows))
        if direction != STEP:
            title = title_of("Throughput against arithmetic intensity", direction)
            planned[name_of("intensity", direction)] = Plan(title, partial(intensity, rows))
    if steps := [row for row in some if row.direction == FORWARD and by_rung.shown(row)]:
        planned["ladder_float32"] = Plan("The ladder in float32", partial(ladder, steps))
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
