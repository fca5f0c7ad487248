"""Rows that a figure shows, and their order."""

import math
from collections.abc import Iterable

from numba_tconv.lab.measure.contestants import AUTO
from numba_tconv.lab.measure.rows import Row, grouped
from numba_tconv.lab.measure.sweep import LAYERS
from numba_tconv.lab.measure.workloads import WORKLOADS
from numba_tconv.lab.report.tables import AGREE


def drawn(row: Row) -> bool:
    return row.rung != "cudnn"


def swept(row: Row) -> bool:
    return "@" in row.workload


def at_full_size(row: Row) -> bool:
    return drawn(row) and not swept(row) and row.roofline is not None


def marked(rows: Iterable[Row]) -> list[Row]:
    """Rows of rungs, and of ``auto`` where it beats all."""
    rows = [row for row in rows if drawn(row)]
    fastest_rung: dict[tuple, float] = {}
    for row in rows:
        if row.rung != AUTO:
            fastest_rung[_of(row)] = min(row.ms_p50, fastest_rung.get(_of(row), row.ms_p50))
    return [row for row in rows if row.rung != AUTO or AGREE * row.ms_p50 < fastest_rung.get(_of(row), math.inf)]


def visible(rows: list[Row]) -> list[str]:
    """Rungs with a curve; last ``auto``, if best at half of its lengths."""
    alone, of_auto = ([row for row in some if row.rung == AUTO] for some in (marked(rows), rows))
    return [rung for rung in rungs(rows) if rung != AUTO or 2 * len(alone) >= len(of_auto)]


def _of(row: Row) -> tuple:
    return row.workload, row.direction, row.dtype, row.precision, row.length


def rungs(rows: Iterable[Row]) -> list[str]:
    return sorted({row.rung for row in rows if drawn(row)}, key=lambda rung: (rung == AUTO, rung))


def swept_layers(rows: Iterable[Row]) -> list[str]:
    names = sorted({row.workload for row in rows})
    order = [*LAYERS, *WORKLOADS]
    places = {name: order.index(base) if (base := name.partition("@")[0]) in order else len(order) for name in names}
    return sorted(names, key=lambda name: (places[name], name))


def workloads(rows: Iterable[Row]) -> list[str]:
    present = {row.workload for row in rows}
    return [name for name in WORKLOADS if name in present] + sorted(present - set(WORKLOADS))


def arithmetics(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    groups = grouped(rows, lambda row: (row.dtype, row.precision))
    return {key: groups[key] for key in sorted(groups, key=lambda key: (key[0] != "float32", *key))}


def taken(rows: Iterable[Row], name: str) -> Row:
    of_workload = [row for row in rows if row.workload == name]
    return fastest([row for row in of_workload if row.rung == AUTO] or of_workload)


def fastest(rows: Iterable[Row]) -> Row:
    return min(rows, key=lambda row: row.ms_p50)
