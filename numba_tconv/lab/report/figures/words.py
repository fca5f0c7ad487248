"""Labels, captions and file names."""

import textwrap
from collections.abc import Iterable

from matplotlib.figure import Figure

from numba_tconv.lab.measure.rows import FROZEN, Row
from numba_tconv.lab.measure.workloads import WORKLOADS
from numba_tconv.selection.directions import FORWARD

from .style import TINY

LETTERS = 17  # an inch


def arithmetic(dtype: str, precision: str) -> str:
    return dtype if dtype == precision else f"{dtype}_{precision}"


def name_of(figure: str, direction: str, *arithmetics: str) -> str:
    return "_".join([figure, *([] if direction == FORWARD else [direction]), *arithmetics])


def words(row: Row) -> str:
    return arithmetic(row.dtype, row.precision).replace("_", " ")


def layer(workload: str) -> str:
    if workload not in WORKLOADS:
        return workload
    p = WORKLOADS[workload].problem
    return f"{workload}'s {p.in_channels}->{p.out_channels} channels, {p.kernel_size} taps, stride {p.stride}"


def held(row: Row) -> str:
    return f"batch {row.workload.partition('@batch')[2]}"


def measured_on(rows: list[Row], live: Iterable[Row] = ()) -> str:
    parts = []
    for label, some in (("", rows), ("live: ", list(live))):
        if some:
            newest = max(some, key=lambda row: row.time)
            versions = f"driver {newest.driver}, torch {newest.torch}, cuDNN {newest.cudnn}"
            versions += f", numba-cuda {newest.numba_cuda}"
            parts.append(f"{label}{newest.gpu}, {versions}, {newest.time[:10]}{_frozen(some)}")
    return ";\n".join(parts)


def _frozen(rows: Iterable[Row]) -> str:
    names = sorted({row.rung for row in rows if getattr(row, "weights", None) == FROZEN})
    return f"; weights packed before the call: {', '.join(names)}" if names else ""


def caption(figure: Figure, text: str) -> None:
    width = int(figure.get_figwidth() * LETTERS)
    figure.supxlabel("\n".join(textwrap.fill(line, width) for line in text.splitlines()), fontsize=TINY, color="0.25")
