"""Performance rows: one measurement a row, in CSV files that are replaced whole."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from . import machine

CALL, FROZEN = "call", "frozen"  # weights packed in the timed call, or once before it
WEIGHTS = CALL, FROZEN


class RowsError(Exception):
    """A rows file cannot be read or written; the message says which and why."""


@dataclass(frozen=True)
class Row(machine.Measured):
    """One measurement.

    Times are in milliseconds, ``length`` in samples, ``gbps`` in 10^9 bytes a second of minimum traffic, ``tflops`` in
    10^12 operations a second. None marks a value that does not apply or was not measured.

    * ``workload``: a name, perhaps with a sweep's suffix ``@total`` or ``@batch<N>``
    * ``direction``: one of directions.DIRECTIONS
    * ``rung``: a registry name, ``auto`` for the selection, or "cudnn" where no rung computes in that precision
    * ``weights``: "call" if packed in the timed call, as for all gradients, steps and "cudnn"; "frozen" if before
    * ``cudnn_ms_p50``: torch's own op, gradient or step; ``conv1d_ms_p50``: forward pass only
    * ``roofline``: floor time / ``ms_p50``
    * ``relerr``: relative norm against float64, the worst result's for a step
    """

    workload: str
    direction: str
    rung: str
    dtype: str
    precision: str
    weights: str
    length: int
    ms_p20: float
    ms_p50: float
    ms_p80: float
    cudnn_ms_p50: float | None
    conv1d_ms_p50: float | None
    gbps: float
    tflops: float
    roofline: float | None
    relerr: float
    cudnn_relerr: float

    @property
    def opponent_ms(self) -> float | None:
        """The faster of torch's own op and the conv1d formulation."""
        return min((ms for ms in (self.cudnn_ms_p50, self.conv1d_ms_p50) if ms is not None), default=None)

    @property
    def floor_ms(self) -> float | None:
        """The roofline's time in ms, by the copy bandwidth of the row's run."""
        return None if self.roofline is None else self.roofline * self.ms_p50


COLUMNS = tuple(field.name for field in fields(Row))
Kind = TypeVar("Kind")  # the dataclass of a row
_PARSE = {
    "str": str,
    "int": int,
    "bool": {"True": True, "False": False}.__getitem__,
    "float": float,
    "float | None": lambda text: float(text) if text else None,
}


def read(path: str | os.PathLike, kind: type[Kind] = Row) -> list[Kind]:
    """The rows of the file at ``path``, in order. Raises RowsError."""
    return list(_parse(_text(Path(path)), str(path), kind))


def read_all(directory: str | os.PathLike) -> list[Row]:
    """The rows of every ``*.csv`` in ``directory``, by file name; none if it is missing. Raises RowsError."""
    return [row for path in sorted(Path(directory).glob("*.csv")) for row in read(path)]


def append(path: str | os.PathLike, rows: Iterable[Kind], kind: type[Kind] = Row) -> None:
    """Add ``rows`` to the file at ``path``, which is created with its directory if need be, and renamed into place.

    Raises RowsError, leaving the file as it was, when it has other columns or cannot be written.
    """
    replace(path, [*existing(path, kind), *rows], kind)


def replace(path: str | os.PathLike, rows: Iterable[Kind], kind: type[Kind] = Row) -> None:
    """Write ``rows`` in place of the file at ``path``, as ``append`` does. Raises RowsError."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_columns(kind))
    for row in rows:
        writer.writerow(_cell(value) for value in astuple(row))
    replace_text(path, out.getvalue())


def check_writable(path: str | os.PathLike, kind: type = Row) -> None:
    """Raise RowsError, before a measurement starts, where ``append`` would."""
    existing(path, kind)
    check_replaceable(path)


def check_replaceable(path: str | os.PathLike) -> None:
    """Raise RowsError where ``replace_text`` would."""
    os.unlink(_beside(Path(path)))


def replace_text(path: str | os.PathLike, text: str) -> bool:
    """``replace_bytes`` for UTF-8 text."""
    return replace_bytes(path, text.encode("utf-8"))


def replace_bytes(path: str | os.PathLike, content: bytes) -> bool:
    """Write ``content`` beside ``path`` and rename it over ``path``; returns whether the content changed. Raises
    RowsError where the file cannot be read or written."""
    path = Path(path)
    try:
        if path.exists() and path.read_bytes() == content:
            return False
    except OSError as error:
        raise RowsError(f"cannot read {path}: {error.strerror}") from error
    beside = _beside(path)
    try:
        with open(beside, "wb") as file:
            file.write(content)
        os.chmod(beside, path.stat().st_mode if path.exists() else 0o644)
        os.replace(beside, path)
    except OSError as error:
        os.unlink(beside)
        raise RowsError(f"cannot write {path}: {error.strerror}") from error
    return True


def latest(rows: Iterable[Row]) -> dict[tuple, Row]:
    """The row to show for each (workload, direction, rung, dtype, precision, length): the newest of the default call,
    else the newest with frozen weights."""

    def rank(row):
        return row.weights == CALL, row.time

    return newest(rows, lambda row: (row.workload, row.direction, row.rung, row.dtype, row.precision, row.length), rank)


def of_main_gpu(rows: Iterable[Kind]) -> list[Kind]:
    """The rows of the GPU that has the most; of equally many, the GPU with the newest."""
    by_gpu: dict[str, list[Kind]] = {}
    for row in rows:
        by_gpu.setdefault(row.gpu, []).append(row)
    return max(by_gpu.values(), key=lambda some: (len(some), max(row.time for row in some)), default=[])


def newest(
    rows: Iterable[Kind], key: Callable[[Kind], tuple], rank: Callable[[Kind], object] = lambda row: row.time
) -> dict[tuple, Kind]:
    """The row of highest ``rank`` for each ``key``, in the order in which keys are first seen."""
    found: dict[tuple, Kind] = {}
    for row in rows:
        if key(row) not in found or rank(row) >= rank(found[key(row)]):
            found[key(row)] = row
    return found


def existing(path: str | os.PathLike, kind: type[Kind] = Row) -> list[Kind]:
    """The rows of the file at ``path``; none if there is no file. Raises RowsError."""
    return read(path, kind) if Path(path).exists() else []


def _beside(path: Path) -> str:
    """A new empty file in the directory of ``path``, which is created if need be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise RowsError(f"cannot write {path}: {error.strerror}") from error
    os.close(descriptor)
    return beside


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RowsError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _columns(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@lru_cache(maxsize=8)  # each explanation reads all rows
def _parse(text: str, path: str, kind: type[Kind]) -> tuple[Kind, ...]:
    lines = csv.reader(io.StringIO(text))
    header = tuple(next(lines, ()))
    if header != _columns(kind):
        different = sorted(set(header) ^ set(_columns(kind))) or ["their order"]
        raise RowsError(
            f"{path} has the columns of another version (different: {', '.join(different)}); "
            "it is left as it is: move it away, or name another file"
        )
    rows, parsers = [], [_PARSE[field.type] for field in fields(kind)]
    for line in lines:
        try:
            values = [parse(text) for parse, text in zip(parsers, line, strict=True)]
        except (ValueError, KeyError) as error:
            raise RowsError(f"{path}, line {lines.line_num}: not a row ({error})") from error
        rows.append(kind(*values))
    return tuple(rows)


def _cell(value) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
