"""Tables of results, made from the recorded rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .directions import DIRECTIONS, FORWARD
from .rows import Row, latest
from .workloads import AUDIO, WORKLOADS

EMPTY = "No rows are recorded yet."


def markdown(header: list[str], lines: Iterable[Iterable[str]], texts: int = 1) -> str:
    """A Markdown table, its columns aligned so that it is legible in a terminal too; the first ``texts`` are text."""
    cells = [header, *([str(cell) for cell in line] for line in lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]

    def row(line):
        aligned = (
            cell.ljust(w) if i < texts else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        return f"| {' | '.join(aligned)} |"

    rule = [("-" * w if i < texts else "-" * (w - 1) + ":") for i, w in enumerate(widths)]
    return "\n".join([row(cells[0]), row(rule), *(row(line) for line in cells[1:])])


def render(rows: Iterable[Row]) -> str:
    """The tables of all measurements at full size, one for each GPU, direction, dtype and precision, newest rows only.

    Times are medians in milliseconds. The last column divides the faster of cuDNN and conv1d, which there is for the
    forward pass alone, by the fastest rung, both taken from that rung's own run.
    """
    tables: dict[tuple, list[Row]] = {}
    for row in latest(row for row in rows if "@" not in row.workload).values():
        tables.setdefault((row.gpu, row.direction, row.dtype, row.precision), []).append(row)
    return "\n\n".join(_table(tables[key]) for key in sorted(tables, key=_order)) or EMPTY


def where(rows: list) -> str:
    """GPU, versions and date of the newest of ``rows``, which may be those of any file."""
    newest = max(rows, key=lambda row: row.time)
    return f"{newest.gpu}, driver {newest.driver}, torch {newest.torch}, cuDNN {newest.cudnn}, {newest.time[:10]}"


def _order(key: tuple) -> tuple:
    gpu, direction, dtype, precision = key
    dtypes = ["float32", "bfloat16", "float16", "float64"]
    return gpu, _place(direction, DIRECTIONS), direction, _place(dtype, dtypes), dtype, precision


def _place(name: str, order: Sequence[str]) -> int:
    return order.index(name) if name in order else len(order)


def _table(rows: list[Row]) -> str:
    by_workload: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_workload.setdefault(row.workload, {})[row.rung] = row
    rungs = sorted({row.rung for row in rows} - {"cudnn"}, key=lambda rung: (rung == "auto", rung))
    names = [name for name in WORKLOADS if name in by_workload] + sorted(set(by_workload) - set(WORKLOADS))
    forward = rows[0].direction == FORWARD
    lines, speedups = [], {}
    for name in names:
        measured = by_workload[name]
        fastest = min((row for rung, row in measured.items() if rung != "cudnn"), key=_ms, default=None)
        shown = fastest or measured["cudnn"]
        if fastest:
            speedups[name] = fastest.opponent_ms / fastest.ms_p50
        lines.append(
            [
                name,
                *(_time(measured[rung].ms_p50 if rung in measured else None) for rung in rungs),
                _time(shown.cudnn_ms_p50),
                *((_time(shown.conv1d_ms_p50),) if forward else ()),
                _time(shown.floor_ms),
                *((f"{fastest.roofline:.0%}" if fastest and fastest.roofline else "-",) if rungs else ()),
                *((f"{speedups[name]:.2f}x" if fastest else "-",) if rungs else ()),
            ]
        )
    first = rows[0]
    arithmetic = first.dtype if first.precision == first.dtype else f"{first.dtype}, {first.precision}"
    title = f"**{first.direction}, {arithmetic}**, milliseconds (median), {where(rows)}"
    theirs = ["cuDNN", "conv1d"] if forward else ["cuDNN"]
    header = ["workload", *rungs, *theirs, "floor", *(["of floor", "speed-up"] if rungs else [])]
    parts = [title, markdown(header, lines)]
    if speedups.keys() >= set(AUDIO):
        mean = math.exp(sum(math.log(speedups[name]) for name in AUDIO) / len(AUDIO))
        parts.append(f"Geometric mean of the speed-ups over {', '.join(AUDIO)}: {mean:.2f}x.")
    return "\n\n".join(parts)


def _ms(row: Row) -> float:
    return row.ms_p50


def _time(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3g}"
