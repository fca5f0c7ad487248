"""The table of short signals."""

from collections.abc import Iterable
from pathlib import Path

from numba_tconv.kernels.k6_wgmma.kernel import WarpgroupMatrix
from numba_tconv.lab.measure.rows import Row, latest, of_main_gpu
from numba_tconv.selection.directions import FORWARD, STEP

from . import tables as table

FILE = Path("segments", "batch16.csv")
HEADER = ["layer@batch", "arithmetic", "L", "k6_wgmma, ms", "auto, ms", "torch, ms", "step, ms", "torch's, ms"]


def render(rows: Iterable[Row]) -> str:
    """Rows of ``auto`` and of k6_wgmma, which does not join."""
    shown = list(latest(of_main_gpu(rows)).values())
    if not shown:
        return ""
    timed = {(row.workload, row.dtype, row.precision, row.length, row.direction, row.rung): row for row in shown}
    lines = sorted({key[:4] for key in timed}, key=lambda line: (line[0], line[1] != "float32", line[3]))
    said = "As in training on segments; `auto` joins a batch to one signal (numba_tconv/selection/joined.py), if faster"
    head = f"**Short signals.** {said}. L: positions of each; {table.where(shown)}."
    return f"{head}\n\n{table.markdown(HEADER, [_cells(line, timed) for line in lines], texts=2)}"


def _cells(line: tuple, timed: dict[tuple, Row]) -> list[str]:
    alone, joined, step = (
        timed.get((*line, *one)) for one in ((FORWARD, WarpgroupMatrix.name), (FORWARD, "auto"), (STEP, "auto"))
    )
    torchs = [f"{one.opponent_ms:.3g}" if one else "-" for one in (joined, step)]
    arithmetic = line[1] if line[1] == line[2] else f"{line[1]}, {line[2]}"
    cells = line[0], arithmetic, str(line[3]), table.time(alone), table.time(joined)
    return [*cells, torchs[0], table.time(step), torchs[1]]
