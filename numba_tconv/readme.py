"""README's claim, ladder and tables: made from the recorded rows, each put between two markers of its name."""

from __future__ import annotations

import os
from pathlib import Path

from . import claim, decoder_times, kernelbench_rows, ladder, rows, table
from .rows import RowsError

NAMES = "claim", "ladder", "table", "kernelbench", "decoders"


def tables(data: str | os.PathLike) -> dict[str, str]:
    """The text between each pair of markers, by its name, from the rows in the directory ``data``. Raises RowsError."""
    data = Path(data)
    results = rows.existing(data / kernelbench_rows.FILE, kernelbench_rows.Result)
    timed = rows.existing(data / decoder_times.FILE, decoder_times.Timed)
    measured = rows.read_all(data)
    return {
        "claim": claim.render(measured),
        "ladder": ladder.render(measured),
        "table": table.render(measured),
        "kernelbench": kernelbench_rows.render(results),
        "decoders": decoder_times.render(timed),
    }


def section(readme: str, name: str) -> str:
    """What stands between the markers of that name in the text of a README. Raises RowsError where one is missing."""
    start, end = _span(readme, name)
    return readme[start:end].strip()


def update(path: str | os.PathLike, tables: dict[str, str]) -> None:
    """Put each of ``tables`` between its markers in the README at ``path``. Raises RowsError, leaving the file as it
    was, where a marker is missing."""
    try:
        readme = Path(path).read_text(encoding="utf-8")
        for name, text in tables.items():
            start, end = _span(readme, name)
            readme = f"{readme[:start]}\n{text}\n{readme[end:]}"
    except OSError as error:
        raise RowsError(f"cannot read {path}: {error.strerror}") from error
    except RowsError as error:
        raise RowsError(f"{path}: {error}") from error
    rows.replace_text(path, readme)


def markers(name: str) -> tuple[str, str]:
    """The lines of a README between which the table of that name stands."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def _span(readme: str, name: str) -> tuple[int, int]:
    """Where the text between the markers begins and ends."""
    begin, finish = markers(name)
    start, end = readme.find(begin), readme.find(finish)
    if start < 0 or end < start:
        raise RowsError(f"the markers {begin} and {finish} are missing")
    return start + len(begin), end
