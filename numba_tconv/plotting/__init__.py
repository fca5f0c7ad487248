"""Figures, drawn from rows and from nothing else, in one style."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from ..decoder_times import Timed
from ..directions import FORWARD, STEP
from ..progress import progress
from ..rows import Row, RowsError, latest
from ..search import RUNG, Tried
from . import by_rung, chosen
from .by_decoder import decoders
from .by_intensity import intensity
from .by_length import throughput
from .by_precision import errors
from .by_prediction import predicted
from .by_rung import ladder
from .by_workload import shares
from .style import STYLE
from .words import arithmetic, name_of

__all__ = ["STYLE", "decoders", "draw_all", "errors", "intensity", "ladder", "predicted", "shares", "throughput"]


def draw_all(
    rows: Iterable[Row],
    directory: str | os.PathLike,
    live: Iterable[Row] = (),
    searched: Iterable[Tried] = (),
    timed: Iterable[Timed] = (),
) -> list[Path]:
    """Draw every figure that ``rows`` give, as SVG and PNG in ``directory``; the paths written.

    One figure of throughput against length for each sweep over several; one of the shares of the roofline for each
    direction, dtype and precision measured at full size; one of errors and one of throughput against arithmetic
    intensity for each direction (a step is several kernels, and has no intensity of its own); the ladder; what was
    predicted of the configurations that were ``searched``; and the decoders that were ``timed``. ``live`` rows are
    drawn beside the recorded sweeps, with hollow markers.
    Raises RowsError where a file cannot be written.
    """
    recorded, fresh = list(latest(rows).values()), list(latest(live).values())
    with matplotlib.rc_context(STYLE):
        figures = _sweeps(recorded, fresh) | _at_full_size(recorded)
        if known := predicted(searched):
            figures[f"predicted_{RUNG}"] = known
        if whole := decoders(timed):
            figures["decoders"] = whole
        drawn = progress(figures.items(), "figures", len(figures))
        return [path for name, figure in drawn for path in _save(figure, Path(directory), name)]


def _sweeps(recorded: list[Row], live: list[Row]) -> dict[str, Figure]:
    def key(row):
        shown = chosen.swept(row) and chosen.drawn(row)
        return (row.workload, row.direction, row.dtype, row.precision) if shown else None

    figures = {}
    groups, groups_live = chosen.grouped(recorded, key), chosen.grouped(live, key)
    for group in groups | groups_live:
        if len({row.length for row in (*groups.get(group, ()), *groups_live.get(group, ()))}) == 1:
            continue  # a workload at another batch, which is no sweep
        workload, direction, *what = group
        name = name_of(f"throughput_{workload.replace('@', '_')}", direction, arithmetic(*what))
        figures[name] = throughput(groups.get(group, []), groups_live.get(group, []))
    return figures


def _at_full_size(recorded: list[Row]) -> dict[str, Figure]:
    figures = {}
    some = [row for row in recorded if chosen.at_full_size(row)]
    for (direction, *what), rows in chosen.grouped(some, lambda row: (row.direction, row.dtype, row.precision)).items():
        figures[name_of("roofline", direction, arithmetic(*what))] = shares(rows)
    for (direction,), rows in chosen.grouped(some, lambda row: (row.direction,)).items():
        figures[name_of("errors", direction)] = errors(rows)
        if direction != STEP:
            figures[name_of("intensity", direction)] = intensity(rows)
    if steps := [row for row in some if row.direction == FORWARD and by_rung.shown(row)]:
        figures["ladder_float32"] = ladder(steps)
    return figures


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
