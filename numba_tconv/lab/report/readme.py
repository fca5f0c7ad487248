"""README.md and plots/README.md: text between markers, from rows."""

import os
from pathlib import Path

from numba_tconv.lab.measure import rows, search
from numba_tconv.lab.measure.rows import RowsError
from numba_tconv.lab.studies import activations, decoder_modes, decoder_times, kernelbench, streaming
from numba_tconv.selection.directions import DIRECTIONS

from . import claim, ladder, segments, summary
from . import figures as plotting
from . import tables as table

FRONT = "claim", "ladder", "ten", "precision"
RESULTS = "figures", "tables", "kernelbench", "decoders", "modes", "activations", "segments", "streaming"
PLACES = "throughput", "ladder", "roofline", "decoders", "errors", "intensity", "predicted"
ARITHMETICS = "float32_tf32", "bfloat16", "float32_ieee"


def tables(data: str | os.PathLike) -> dict[str, str]:
    """Text by name of its markers, from the rows in ``data``. Raises RowsError."""
    data = Path(data)
    results = rows.existing(data / kernelbench.FILE, kernelbench.Result)
    timed = rows.existing(data / decoder_times.FILE, decoder_times.Timed)
    modes = rows.existing(data / decoder_modes.FILE, decoder_modes.Timed)
    steps = rows.existing(data / streaming.FILE, streaming.Timed)
    measured = rows.read_all(data)
    return {
        "claim": claim.render(measured, modes, steps),
        "ladder": ladder.render(measured),
        "ten": summary.ten(measured),
        "precision": summary.precisions(measured),
        "figures": figures(
            plotting.plans(measured, searched=rows.existing(data / search.FILE, search.Tried), timed=modes)
        ),
        "tables": table.render(measured),
        "kernelbench": kernelbench.render(results),
        "decoders": decoder_times.render(timed),
        "modes": decoder_modes.render(modes),
        "activations": activations.render(rows.existing(data / activations.FILE, activations.Timed)),
        "segments": segments.render(rows.existing(data / segments.FILE)),
        "streaming": streaming.render(steps),
    }


def figures(planned: dict[str, plotting.Plan]) -> str:
    def place(name):
        family = PLACES.index(name.partition("_")[0])
        direction = next((number for number, of in enumerate(DIRECTIONS) if f"_{of}" in name), 0)
        arithmetic = next((number for number, of in enumerate(ARITHMETICS) if name.endswith(of)), len(ARITHMETICS))
        return family, direction, "batch1_" in name, arithmetic, name

    order = sorted(planned, key=place)
    return "\n\n".join(f"**{planned[name].title}**\n\n![{planned[name].title}]({name}.png)" for name in order)


def section(readme: str, name: str) -> str:
    start, end = _span(readme, name)
    return readme[start:end].strip()


def updated(path: str | os.PathLike, tables: dict[str, str]) -> str:
    """The page with ``tables`` between their markers. Raises RowsError for a missing marker or unreadable file."""
    try:
        readme = Path(path).read_text(encoding="utf-8")
        for name, text in tables.items():
            start, end = _span(readme, name)
            readme = f"{readme[:start]}\n{text}\n{readme[end:]}"
    except OSError as error:
        raise RowsError(f"cannot read {path}: {error.strerror}") from error
    except RowsError as error:
        raise RowsError(f"{path}: {error}") from error
    return readme


def update(path: str | os.PathLike, tables: dict[str, str]) -> bool:
    """Write ``updated``; returns whether it changed. Raises RowsError, leaving the file as it was."""
    return rows.replace_text(path, updated(path, tables))


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def _span(readme: str, name: str) -> tuple[int, int]:
    begin, finish = markers(name)
    start, end = readme.find(begin), readme.find(finish)
    if start < 0 or end < start:
        raise RowsError(f"the markers {begin} and {finish} are missing")
    return start + len(begin), end
