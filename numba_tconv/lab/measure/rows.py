"""Measurements in CSV files."""

import csv
import io
import os
import tempfile
from collections.abc import Callable, Hashable, Iterable
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch

from numba_tconv.formula.precision import PRECISIONS

from . import machine

CALL, FROZEN = "call", "frozen"  # weights packed in the timed call, or before it
WEIGHTS = CALL, FROZEN


class RowsError(Exception):
    """A rows file cannot be read or written."""


@dataclass(frozen=True)
class Row(machine.Measured):
    """One measurement.

    Times are in ms, ``length`` in samples, ``gbps`` in 10^9 bytes/s of minimum traffic, ``tflops`` in 10^12
    operations/s. None: not applicable or not measured.

    * ``workload``: a name, with a sweep's suffix ``@batch<N>``
    * ``rung``: a name, ``auto`` for the selection, or "cudnn" where no rung has the precision
    * ``cudnn_ms_p50``: torch's op, gradient or step; ``conv1d_ms_p50``: forward pass only
    * ``roofline``: floor time / ``ms_p50``
    * ``relerr``: relative norm against float64, a step's worst
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
    cudnn_ms_p50: float
    conv1d_ms_p50: float | None
    gbps: float
    tflops: float
    roofline: float | None
    relerr: float
    cudnn_relerr: float

    def __post_init__(self):
        known = PRECISIONS.get(getattr(torch, self.dtype, None), ())
        if not known or self.precision not in (known if len(known) > 1 else (self.dtype,)):
            raise ValueError(f"{self.dtype} has no precision {self.precision}")

    @property
    def opponent_ms(self) -> float:
        """The faster of torch's op and conv1d."""
        return min(ms for ms in (self.cudnn_ms_p50, self.conv1d_ms_p50) if ms is not None)

    @property
    def floor_ms(self) -> float | None:
        """The roofline's ms, by the run's copy bandwidth."""
        return None if self.roofline is None else self.roofline * self.ms_p50


COLUMNS = tuple(field.name for field in fields(Row))
Kind = TypeVar("Kind")
_PARSE = {
    str: str,
    int: int,
    bool: {"True": True, "False": False}.__getitem__,
    float: float,
    float | None: lambda text: float(text) if text else None,
}


def read(path: str | os.PathLike, kind: type[Kind] = Row) -> list[Kind]:
    """The file's rows. Raises RowsError."""
    return list(_parse(_text(Path(path)), str(path), kind))


def read_all(directory: str | os.PathLike) -> list[Row]:
    """Rows of all ``*.csv`` in ``directory``. Raises RowsError."""
    return [row for path in sorted(Path(directory).glob("*.csv")) for row in read(path)]


def append(path: str | os.PathLike, rows: Iterable[Kind], kind: type[Kind] = Row) -> None:
    """Add ``rows`` to the file, or create it.

    Raises RowsError, leaving the file as it was, for other columns or a failed write.
    """
    replace(path, [*existing(path, kind), *rows], kind)


def replace(path: str | os.PathLike, rows: Iterable[Kind], kind: type[Kind] = Row) -> None:
    """Replace the file's rows. Raises RowsError as ``append``."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_columns(kind))
    for row in rows:
        writer.writerow(_cell(value) for value in astuple(row))
    replace_text(path, out.getvalue())


def check_writable(path: str | os.PathLike, kind: type = Row) -> None:
    """Raise RowsError where ``append`` would."""
    existing(path, kind)
    check_replaceable(path)


def check_replaceable(path: str | os.PathLike) -> None:
    """Raise RowsError where ``replace_text`` would."""
    os.unlink(_beside(Path(path)))


def replace_text(path: str | os.PathLike, text: str) -> bool:
    """``replace_bytes`` for UTF-8 text."""
    return replace_bytes(path, text.encode("utf-8"))


def replace_bytes(path: str | os.PathLike, content: bytes) -> bool:
    """Replace the file at once; returns whether it changed. Raises RowsError."""
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
    """The newest of CALL, else FROZEN, by (workload, direction, rung, dtype, precision, length)."""

    def rank(row):
        return row.weights == CALL, row.time

    return newest(rows, lambda row: (row.workload, row.direction, row.rung, row.dtype, row.precision, row.length), rank)


def of_main_gpu(rows: Iterable[Kind]) -> list[Kind]:
    """Rows of the GPU with most; of equals, the newest."""
    by_gpu = grouped(rows, lambda row: row.gpu)
    return max(by_gpu.values(), key=lambda some: (len(some), max(row.time for row in some)), default=[])


def grouped(rows: Iterable[Kind], key: Callable[[Kind], Hashable]) -> dict:
    """Rows by ``key``, in their order; without those whose key is None."""
    groups: dict[Hashable, list[Kind]] = {}
    for row in rows:
        if (group := key(row)) is not None:
            groups.setdefault(group, []).append(row)
    return groups


def newest(
    rows: Iterable[Kind], key: Callable[[Kind], tuple], rank: Callable[[Kind], object] = lambda row: row.time
) -> dict[tuple, Kind]:
    """The row of highest ``rank`` for each ``key``, ordered by keys."""
    found: dict[tuple, Kind] = {}
    for row in rows:
        if key(row) not in found or rank(row) >= rank(found[key(row)]):
            found[key(row)] = row
    return found


def existing(path: str | os.PathLike, kind: type[Kind] = Row) -> list[Kind]:
    """As ``read``; none without the file. Raises RowsError."""
    return read(path, kind) if Path(path).exists() else []


def _beside(path: Path) -> str:
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


@lru_cache(maxsize=8)  # every explanation reads all rows
def _parse(text: str, path: str, kind: type[Kind]) -> tuple[Kind, ...]:
    lines, parsers = csv.reader(io.StringIO(text)), [_PARSE[field.type] for field in fields(kind)]
    try:
        header = tuple(next(lines, ()))
        if header != _columns(kind):
            different = sorted(set(header) ^ set(_columns(kind))) or ["their order"]
            raise RowsError(
                f"{path} has the columns of another version (different: {', '.join(different)}); "
                "it is left as it is: move it away, or name another file"
            )
        return tuple(kind(*(parse(text) for parse, text in zip(parsers, line, strict=True))) for line in lines)
    except (ValueError, KeyError, csv.Error) as error:
        raise RowsError(f"{path}, line {lines.line_num}: not a row ({error})") from error


def _cell(value) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
