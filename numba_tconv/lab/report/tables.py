"""Tables of results."""

from collections.abc import Iterable, Sequence
from statistics import geometric_mean

from numba_tconv.lab.measure.rows import CALL, FROZEN, Row, grouped, latest
from numba_tconv.lab.measure.workloads import AUDIO, WORKLOADS
from numba_tconv.selection.directions import DIRECTIONS, FORWARD

EMPTY = "No rows are recorded yet."
MARK = "*"  # frozen weights
ALIKE = 1.02  # closer frozen times are not shown
AGREE = 1.07  # largest ratio of times of one kernel


def markdown(header: list[str], lines: Iterable[Iterable[str]], texts: int = 1) -> str:
    """The first ``texts`` columns are text, the others numbers."""
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
    """Rows at full size: a section for each GPU, a table for each direction, dtype and precision.

    Floor share and speed-up, over the faster of cuDNN and conv1d, are ``auto``'s, else the fastest rung's.
    """
    by_gpu = grouped(rows, lambda row: row.gpu if "@" not in row.workload else None)
    return "\n\n".join(_of_gpu(gpu, by_gpu[gpu]) for gpu in sorted(by_gpu, key=lambda gpu: -len(by_gpu[gpu]))) or EMPTY


def where(rows: list) -> str:
    newest = max(rows, key=lambda row: row.time)
    return f"{newest.gpu}, driver {newest.driver}, torch {newest.torch}, cuDNN {newest.cudnn}, {newest.time[:10]}"


def arithmetic(row) -> str:
    return row.dtype if row.precision == row.dtype else f"{row.dtype}, {row.precision}"


def time(row: Row | None) -> str:
    """The row's ms, with MARK for frozen weights; "-" without a row."""
    return "-" if row is None else _ms(row.ms_p50) + (MARK if row.weights == FROZEN else "")


def note(rows: Iterable[Row]) -> str:
    marked = any(row.weights == FROZEN for row in rows)
    return f"(`{MARK}`: weights packed before the call, as in a frozen layer; no row of the default call yet.)" * marked


def agreeing(of_rungs: dict[str, Row]) -> dict[str, Row]:
    """A line's rows, by rung, without outdated ones.

    Where ``auto`` and the fastest rung differ by more than AGREE, a kernel has changed: older rows than ``auto``'s,
    except cuDNN's, are dropped.
    """
    auto = of_rungs.get("auto")
    others = [row.ms_p50 for rung, row in of_rungs.items() if rung not in ("auto", "cudnn")]
    if auto is None or not others or 1 / AGREE <= min(others) / auto.ms_p50 <= AGREE:
        return of_rungs
    return {
        rung: row
        for rung, row in of_rungs.items()
        if rung == "cudnn" or row.commit == auto.commit or row.time >= auto.time
    }


def _of_gpu(gpu: str, rows: list[Row]) -> str:
    frozen = latest(row for row in rows if row.rung == "auto" and row.weights == FROZEN)
    tables = grouped(latest(rows).values(), lambda row: (row.direction, row.dtype, row.precision))
    parts = [_table(tables[key], list(frozen.values())) for key in sorted(tables, key=_order)]
    return "\n\n".join([f"## Tables: {gpu}", *parts])


def _order(key: tuple) -> tuple:
    direction, dtype, precision = key
    dtypes = ["float32", "bfloat16", "float16", "float64"]
    return _place(direction, DIRECTIONS), direction, _place(dtype, dtypes), dtype, precision


def _place(name: str, order: Sequence[str]) -> int:
    return order.index(name) if name in order else len(order)


def _table(rows: list[Row], frozen: list[Row]) -> str:
    by_workload: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_workload.setdefault(row.workload, {})[row.rung] = row
    by_workload = {name: agreeing(measured) for name, measured in by_workload.items()}
    shown = [row for measured in by_workload.values() for row in measured.values()]
    rungs = sorted({row.rung for row in shown} - {"cudnn"}, key=lambda rung: (rung == "auto", rung))
    names = [name for name in WORKLOADS if name in by_workload] + sorted(set(by_workload) - set(WORKLOADS))
    forward = rows[0].direction == FORWARD
    beside = {name: row for name in names if (row := _beside(by_workload[name].get("auto"), frozen))}
    lines, speedups = [], {}
    for name in names:
        measured = by_workload[name]
        ours = [row for rung, row in measured.items() if rung != "cudnn"]
        best = measured.get("auto") or min(ours, key=lambda row: row.ms_p50, default=None)
        theirs = best or measured["cudnn"]
        if best:
            speedups[name] = best.opponent_ms / best.ms_p50
        lines.append(
            [
                name,
                *(time(measured.get(rung)) for rung in rungs),
                *((time(beside.get(name)).rstrip(MARK),) if beside else ()),
                _ms(theirs.cudnn_ms_p50),
                *((_ms(theirs.conv1d_ms_p50),) if forward else ()),
                _ms(theirs.floor_ms),
                *((f"{best.roofline:.0%}" if best and best.roofline else "-",) if rungs else ()),
                *((f"{speedups[name]:.2f}x" if best else "-",) if rungs else ()),
            ]
        )
    newest = max(shown, key=lambda row: row.time)
    title = f"### {newest.direction}, {arithmetic(newest)}, {newest.gpu}"
    older = f", the oldest of {min(shown, key=lambda row: row.time).time[:10]}" * (len({r.commit for r in shown}) > 1)
    said = f"Milliseconds (median); newest commit {newest.commit}{older}; {where(shown)}."
    theirs = ["cuDNN", "conv1d"] if forward else ["cuDNN"]
    header = ["workload", *rungs, *(["frozen"] if beside else []), *theirs, "floor"]
    parts = [title, said, markdown([*header, *(["of floor", "speed-up"] if rungs else [])], lines)]
    if speedups.keys() >= set(AUDIO):
        average = geometric_mean(speedups[name] for name in AUDIO)
        parts.append(f"Geometric mean of the speed-ups over {', '.join(AUDIO)}: {average:.2f}x.")
    return "\n\n".join([*parts, *filter(None, [note(shown)])])


def _beside(auto: Row | None, frozen: list[Row]) -> Row | None:
    """The frozen row beside a call's: no older, and different by more than ALIKE."""
    if auto is None or auto.weights != CALL:
        return None
    same = ("workload", "direction", "dtype", "precision", "length")
    found = [row for row in frozen if all(getattr(row, name) == getattr(auto, name) for name in same)]
    found = [row for row in found if row.time >= auto.time or row.commit == auto.commit]
    return found[0] if found and not 1 / ALIKE <= found[0].ms_p50 / auto.ms_p50 <= ALIKE else None


def _ms(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3g}"
