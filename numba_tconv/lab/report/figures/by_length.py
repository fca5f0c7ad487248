"""Speed against length."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from numba_tconv.lab.measure.contestants import AUTO
from numba_tconv.lab.measure.rows import Row, grouped
from numba_tconv.lab.measure.workloads import of_row
from numba_tconv.selection.directions import FORWARD, STEP

from .chosen import fastest, swept_layers, visible
from .style import ROOFLINE, SMALL, TORCH, label_points, look
from .words import caption, held, layer, measured_on, words

COLUMNS = 4
ABOVE = 4  # times the fastest curve: a roofline that rises further is cut
STEADY = 0.9  # share of the long lengths' speed-up at which the title's lengths begin


def throughput(rows: list[Row], live: Sequence[Row] = ()) -> Figure:
    """Times as fast as torch against samples of output; a panel for each layer.

    ``live`` rows have hollow markers.
    """
    beside = _gains_beside_the_grid(rows)
    rows, live = _on_the_grid(rows), _on_the_grid(live)
    layers = swept_layers([*rows, *live])
    columns = min(COLUMNS, len(layers))
    lines = -(-len(layers) // columns)
    size = (2.7 * columns, 0.9 + 2.3 * lines) if lines > 1 or columns > 1 else (6.5, 4.2)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axes, name in zip(panels.flat, layers, strict=False):
        _panel(axes, *([row for row in some if row.workload == name] for some in (rows, live)))
    for axes in panels.flat[len(layers) :]:
        axes.set_visible(False)
    _fit([axes for axes in panels.flat if axes.get_visible()], [*rows, *live])
    for axes, name in zip(panels.flat, layers, strict=False):
        _label(axes, alone=len(layers) == 1)
        axes.set_title(layer(name.partition("@")[0]) if len(layers) == 1 else name.partition("@")[0], fontsize=9)
    figure.suptitle(finding([*rows, *live]), fontsize=10)
    for axes in panels[-1]:
        axes.set_xlabel("samples of output (logarithmic)", fontsize=SMALL)
    figure.supylabel("times as fast as torch (logarithmic)", fontsize=9)
    torch = "torch" if (rows or live)[0].direction == STEP else "torch: the faster of cuDNN and conv1d"
    if beside:
        torch += f"; one position more or less: {min(beside):.1f} to {max(beside):.1f} times as fast"
    caption(figure, f"{torch}; roofline: floor time of the same run\n{measured_on(rows, live)}")
    return figure


def finding(rows: Sequence[Row]) -> str:
    rows = _on_the_grid(rows)
    best = map(fastest, grouped(rows, lambda row: (row.workload, samples(row))).values())
    by_length = {
        length: [row.opponent_ms / row.ms_p50 for row in some] for length, some in grouped(best, samples).items()
    }
    lengths = sorted(by_length)
    lowest = {start: min(min(by_length[n]) for n in lengths if n >= start) for start in lengths}
    steady = STEADY * lowest[lengths[len(lengths) // 2]]
    start = next(n for n in lengths if lowest[n] >= steady)
    low, high = lowest[start], max(max(by_length[n]) for n in lengths if n >= start)
    first, layers = rows[0], len(swept_layers(rows))
    what = {FORWARD: "", STEP: "Training: "}.get(first.direction, f"{first.direction}: ")
    times = f"{low:.1f}" if high < 1.05 * low else f"{low:.1f} to {high:.1f}"
    whose = swept_layers(rows)[0].partition("@")[0] if layers == 1 else f"{layers} layers"
    return f"{what}{times} times as fast as torch from {start:,} samples on ({whose}, {words(first)}, {held(first)})"


def samples(row: Row) -> int:
    """Samples of output, ``stride`` a position."""
    workload = of_row(row.workload, row.length)
    return row.length * (workload.problem.stride if workload else 1)


def _gains_beside_the_grid(rows: Sequence[Row]) -> list[float]:
    on_it = {(row.workload, row.length) for row in _on_the_grid(rows)}
    places = [(row, {(row.workload, row.length + more) for more in (-1, 0, 1)} & on_it) for row in rows]
    beside = [row for row, near in places if row.rung == AUTO and near and (row.workload, row.length) not in near]
    return [row.opponent_ms / row.ms_p50 for row in beside]


def _on_the_grid(rows: Sequence[Row]) -> list[Row]:
    """Rows at powers of two of output, if any."""

    def on_it(row):
        workload = of_row(row.workload, row.length)
        stride = workload.problem.stride if workload else 1
        power = 1 << (row.length * stride + stride - 1).bit_length() - 1
        return row.length == max(1, power // stride)

    return [row for row in rows if on_it(row)] or list(rows)


def _panel(axes: Axes, rows: list[Row], live: list[Row]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    curves = axes.curves = []

    def line(points, label, style):
        points = sorted(points)
        if points:
            axes.plot(*zip(*points, strict=True), markersize=3.5, **style)
            curves.append((points[-1], label))

    for some, suffix, change in ((rows, "", {}), (live, ", live", {"linestyle": "-.", "markerfacecolor": "white"})):
        for rung in visible(some):
            own = [row for row in some if row.rung == rung]
            line([(samples(row), row.opponent_ms / row.ms_p50) for row in own], rung + suffix, look(rung) | change)
    best: dict[int, Row] = {}
    for row in sorted(rows or live, key=lambda row: -row.ms_p50):
        best[samples(row)] = row
    line([(n, row.opponent_ms / row.floor_ms) for n, row in best.items() if row.floor_ms], "roofline", ROOFLINE)
    line([(n, 1.0) for n in best], "torch", TORCH)


def _fit(panels: list[Axes], rows: Sequence[Row]) -> None:
    heights = [y for axes in panels for one in axes.lines for y in one.get_ydata()]
    measured = [row.opponent_ms / row.ms_p50 for row in rows]
    lengths = [samples(row) for row in rows]
    room = (max(lengths) / min(lengths)) ** 0.42
    panels[0].set_xlim(min(lengths) / 1.5, max(lengths) * room * 1.5)
    top = min(max(heights), ABOVE * max(1, *measured))
    panels[0].set_ylim(max(min(heights), top / 1000) / 1.3, top * 1.4)
    panels[0].xaxis.set_major_locator(LogLocator(base=32 if max(lengths) <= 2**12 * min(lengths) else 1024))
    panels[0].xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}" if n <= max(lengths) else ""))
    panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0].yaxis.set_major_formatter("{x:g}")
    panels[0].yaxis.set_minor_formatter(NullFormatter())
    for axes in panels:
        axes.tick_params(labelsize=SMALL)


def _label(axes: Axes, alone: bool) -> None:
    names = [(point, name if alone else name.partition("_")[0]) for point, name in axes.curves]
    label_points(axes, names)
