"""README's ladder."""

from collections.abc import Iterable

from numba_tconv.lab.measure.rows import FROZEN, Row, latest, of_main_gpu
from numba_tconv.selection.directions import FORWARD
from numba_tconv.selection.registry import LADDER, RUNGS

from .tables import MARK, markdown, note, where

WORKLOAD = "kb64"
BESIDE = {"k5_dmma": (WORKLOAD, "float64"), "depthwise": ("depthwise", "float32")}
NAMES = {"ieee": "full precision", "tf32": "TF32", "float64": "float64"}


def render(rows: Iterable[Row]) -> str:
    """A line for each rung, from the GPU with most rows.

    Ladder rungs show float32 on WORKLOAD, in full precision, else in TF32, and the gain over the rung below; those in
    BESIDE the gain over the ladder's fastest.
    """
    dtypes = {"float32", *(dtype for _, dtype in BESIDE.values())}
    measured = [row for row in rows if row.direction == FORWARD and row.dtype in dtypes]
    measured = list(latest(of_main_gpu(measured)).values())
    lines = markdown(["rung", "idea", "measured", "gain"], [_line(name, measured) for name in RUNGS], texts=3)
    shown = [row for name in RUNGS if (row := _own(name, measured))]
    return f"{lines}\n\nForward, {where(shown)}. {note(shown)}".rstrip() if shown else lines


def _line(name: str, measured: list[Row]) -> list[str]:
    rung = RUNGS[name]
    file = type(rung).__module__.replace(".", "/") + ".py"
    ladder = [rung.name for rung in LADDER]
    workload, dtype = BESIDE.get(name, (WORKLOAD, "float32"))
    measured = [row for row in measured if row.dtype == dtype]
    own = _own(name, measured)
    others = ladder[: ladder.index(name)][-1:] if name in ladder else ladder
    below = min((row.ms_p50 for other in others if (row := _time(measured, other, workload))), default=None)
    return [
        f"[`{name}`]({file})",
        rung.idea,
        f"{workload}: {float(f'{own.ms_p50:.3g}'):g} ms{MARK * (own.weights == FROZEN)}, {NAMES[own.precision]}"
        if own
        else "-",
        f"{below / own.ms_p50:.1f}x" if own and below else "-",
    ]


def _own(name: str, measured: list[Row]) -> Row | None:
    workload, dtype = BESIDE.get(name, (WORKLOAD, "float32"))
    return _time([row for row in measured if row.dtype == dtype], name, workload)


def _time(measured: list[Row], name: str, workload: str) -> Row | None:
    found = {row.precision: row for row in measured if (row.rung, row.workload) == (name, workload)}
    return next((found[precision] for precision in NAMES if precision in found), None)
