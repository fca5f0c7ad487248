"""README's ten layers and precisions."""

from collections.abc import Iterable
from statistics import geometric_mean, median

from numba_tconv.lab.measure.rows import Row, latest, of_main_gpu
from numba_tconv.lab.measure.workloads import WORKLOADS
from numba_tconv.selection.directions import FORWARD, STEP

from .tables import EMPTY, markdown, note, time, where

LAYERS = (
    *("kb64", "hifigan_u1", "hifigan_u3", "dac_u1", "encodec_u4", "oobleck_u4", "seamless_u1", "mimi", "istft"),
    "small",
)
COLUMNS = ((FORWARD, "tf32"), (FORWARD, "bfloat16"), (STEP, "tf32"), (STEP, "bfloat16"))
NAMES = {"tf32": "TF32", "bfloat16": "bf16"}

PRODUCTS = {
    ("float32", "ieee"): "exact products, float32 sums, on CUDA cores",
    ("float32", "tf32"): "operands rounded to 11 bits, on tensor cores",
    ("float32", "tf32x3"): "operands split into two fp16 numbers, three products on tensor cores",
    ("float16", "float16"): "exact products, float32 sums, on tensor cores",
    ("bfloat16", "bfloat16"): "exact products, float32 sums, on tensor cores",
    ("float64", "float64"): "float64, on tensor cores where the GPU has them",
}
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


def ten(rows: Iterable[Row]) -> str:
    """The selection's time and speed-up on LAYERS, forward and in training steps."""
    found = {key: row for key, row in _picked(rows).items() if key[0] in LAYERS}
    if not found:
        return EMPTY
    header = ["layer", "channels, taps, stride", *(f"{direction}, {NAMES[name]}" for direction, name in COLUMNS)]
    lines = [
        [name, _sizes(name), *(_cell(found.get((name, *column))) for column in COLUMNS)]
        for name in LAYERS
        if any((name, *column) in found for column in COLUMNS)
    ]
    shown_rows = [*found.values()]
    said = f"Milliseconds, and how many times as fast as torch; {where(shown_rows)}. {note(shown_rows)}".rstrip()
    return f"{markdown(header, lines, texts=2)}\n\n{said}"


def lines(rows: Iterable[Row]) -> list[str]:
    found, found_lines = _picked(rows), []
    for name in LAYERS:
        cells = [(NAMES[column[1]], _cell(found.get((name, *column)))) for column in COLUMNS if column[0] == FORWARD]
        if any(cell != "-" for _, cell in cells):
            told = ", ".join(f"{arithmetic} {cell.replace(' (', ' ms (')}" for arithmetic, cell in cells)
            found_lines.append(f"{name:<12} {_sizes(name):<30}  {told}")
    return found_lines


def shown(rows: Iterable[Row]) -> list[Row]:
    return [row for (name, direction, _), row in _picked(rows).items() if name in LAYERS and direction == FORWARD]


def precisions(rows: Iterable[Row]) -> str:
    """A line for each precision, forward at full size: median errors of ours and torch's, mean speed-up."""
    picked = [row for row in rows if (row.rung, row.direction) == ("auto", FORWARD) and "@" not in row.workload]
    picked = list(latest(of_main_gpu(picked)).values())
    if not picked:
        return EMPTY
    table = []
    for (dtype, precision), products in PRODUCTS.items():
        some = [row for row in picked if (row.dtype, row.precision) == (dtype, precision)]
        if some:
            errors = (f"{median(getattr(row, of) for row in some):.0e}" for of in ("relerr", "cudnn_relerr"))
            errors = ("reference" if error == "0e+00" else error for error in errors)  # torch's float64 itself
            speedup = f"{geometric_mean(row.opponent_ms / row.ms_p50 for row in some):.1f}x"
            table.append([dtype, f'`"{SHORT.get(precision, precision)}"`', products, *errors, speedup])
    header = ["dtype", "`precision=`", "products", "error", "torch's error", "speed-up"]
    return markdown(header, table, texts=3)


def _picked(rows: Iterable[Row]) -> dict[tuple, Row]:
    picked = [row for row in rows if row.rung == "auto" and (row.direction, row.precision) in COLUMNS]
    picked = latest(row for row in of_main_gpu(picked) if row.workload in WORKLOADS).values()
    return {(row.workload, row.direction, row.precision): row for row in picked}


def _cell(row: Row | None) -> str:
    return time(row) if row is None else f"{time(row)} ({row.opponent_ms / row.ms_p50:.1f}x)"


def _sizes(name: str) -> str:
    p = WORKLOADS[name].problem
    grouped = f" in {p.groups} groups" if p.groups > 1 else ""
    return f"{p.in_channels} to {p.out_channels}{grouped}, {p.kernel_size}, {p.stride}"
