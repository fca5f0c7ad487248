"""The rows that a figure shows, and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from numba_tconv.lab.measure.rows import Row
from numba_tconv.lab.measure.workloads import WORKLOADS
from numba_tconv.selection.directions import STEP

Of = TypeVar("Of")


def drawn(row: Row) -> bool:
    """Whether the row has a mark: rungs, and a step's ``auto``, which elsewhere repeats a rung."""
    return row.rung != "cudnn" and (row.rung != "auto" or row.direction == STEP)


def swept(row: Row) -> bool:
    return "@" in row.workload


def at_full_size(row: Row) -> bool:
    """Whether the row has a mark and a roofline share, at its workload's size."""
    return drawn(row) and not swept(row) and row.roofline is not None


def rungs(rows: Iterable[Row]) -> list[str]:
    return sorted({row.rung for row in rows if drawn(row)})


def workloads(rows: Iterable[Row]) -> list[str]:
    present = {row.workload for row in rows}
    return [name for name in WORKLOADS if name in present] + sorted(present - set(WORKLOADS))


def arithmetics(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows by dtype and precision, float32 and "ieee" first."""
    groups = grouped(rows, lambda row: (row.dtype, row.precision))
    return {key: groups[key] for key in sorted(groups, key=lambda key: (key[0] != "float32", *key))}


def fastest(rows: Iterable[Row]) -> Row:
    return min(rows, key=lambda row: row.ms_p50)


def grouped(rows: Iterable[Of], key: Callable[[Of], tuple | None]) -> dict[tuple, list[Of]]:
    """The rows by key; those with None are left out."""
    groups: dict[tuple, list[Of]] = {}
    for row in rows:
        if (group := key(row)) is not None:
            groups.setdefault(group, []).append(row)
    return groups
