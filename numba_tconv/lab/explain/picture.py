"""An SVG picture of taps and phases."""

from html import escape

from numba_tconv.formula.problem import Problem
from numba_tconv.formula.taps import Taps

CELL_W, CELL_H, GAP, LABEL_W = 52, 22, 2, 64
MOST_PHASES, MOST_SHIFTS, MOST_OUTPUTS = 8, 12, 13
# Paul Tol's light palette, for the colour-blind.
COLOURS = ("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00")
EMPTY = "#dddddd"  # phase without taps
OTHER = "#f4f4f4"  # phase not shown


def picture(problem: Problem) -> str:
    """Each phase's taps below the inputs they read for column j; then the first outputs."""
    taps, outputs = problem.taps, range(min(problem.out_length, MOST_OUTPUTS))
    phases = range(min(taps.stride, MOST_PHASES))
    deepest = max(taps.shift(k) for k in range(taps.kernel_size))
    shifts = range(min(deepest + 1, MOST_SHIFTS))
    parts = [_text(LABEL_W + _x(q), 0, "x[j]" if q == 0 else f"x[j-{q}]") for q in shifts]
    if deepest >= MOST_SHIFTS:
        parts.append(_text(LABEL_W + _x(MOST_SHIFTS), 0, f"{deepest + 1 - MOST_SHIFTS} more"))
    for line, r in enumerate(phases, 1):
        parts.append(_text(0, line, f"phase {r}", LABEL_W))
        own = [k for k in taps.of_phase(r) if taps.shift(k) < MOST_SHIFTS]
        parts += [_cell(taps.shift(k), line, f"tap {k}", _colour(taps, r)) for k in own]
        if not taps.of_phase(r):
            parts.append(_cell(0, line, "bias", EMPTY))
    line = len(phases) + 1
    if taps.stride > MOST_PHASES:
        parts.append(_text(0, line, f"{taps.stride - MOST_PHASES} more", LABEL_W))
        line += 1
    parts.append(_text(0, line, "outputs", LABEL_W))
    parts += [_cell(o, line, f"y[{o}]", _colour(taps, (o + problem.padding) % taps.stride)) for o in outputs]
    width, height = LABEL_W + _x(MOST_OUTPUTS), (line + 1) * (CELL_H + GAP)
    label = escape(f"{taps.kernel_size} taps in {taps.stride} phases, and the phases of the first outputs")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11">{"".join(parts)}</svg>'
    )


def _colour(taps: Taps, phase: int) -> str:
    if not taps.of_phase(phase):
        return EMPTY
    return COLOURS[phase] if phase < MOST_PHASES else OTHER


def _x(column: int) -> int:
    return column * (CELL_W + GAP)


def _cell(column: int, line: int, text: str, colour: str) -> str:
    x, y = LABEL_W + _x(column), line * (CELL_H + GAP)
    box = f'<rect x="{x}" y="{y}" width="{CELL_W}" height="{CELL_H}" rx="3" fill="{colour}"/>'
    return box + _text(x, line, text, fill="#111111")


def _text(x: int, line: int, text: str, width: int = CELL_W, fill: str = "currentColor") -> str:
    at = f'x="{x + width / 2:g}" y="{line * (CELL_H + GAP) + CELL_H / 2 + 4:g}"'
    return f'<text {at} text-anchor="middle" fill="{fill}">{escape(text)}</text>'
