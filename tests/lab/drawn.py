"""What figures and pages show of made-up rows, for the record of tests/plans.py."""

import random
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numba_tconv.kernels.k6_wgmma.choose import choose_whole, cost
from numba_tconv.kernels.k6_wgmma.tile import configs
from numba_tconv.lab.cli import commands
from numba_tconv.lab.measure import rows, search, workloads
from numba_tconv.lab.measure.bench import DTYPES, peak_name
from numba_tconv.lab.report import figures, readme, segments, summary
from numba_tconv.lab.report.figures import style
from numba_tconv.lab.studies import activations, decoder_modes, decoder_times, kernelbench, streaming
from numba_tconv.runtime.device import H200
from numba_tconv.selection.directions import DIRECTIONS, FORWARD
from tests import samples

NAMES = ("kb64", "kb79", "hifigan_u1", "hifigan_u3", "dac_u1", "oobleck_u4", "mimi", "depthwise", "small", "istft")
SWEPT = ("kb64", "kb74", "hifigan_u1", "encodec_u4", "mimi")
ARITHMETICS = (("float32", "ieee"), ("float32", "tf32"), ("bfloat16", "bfloat16"), ("float64", "float64"))
RUNGS = {
    "ieee": ("k1_gather", "k4_register_tile", "depthwise"),
    "tf32": ("k5_mma", "k6_wgmma"),
    "bfloat16": ("k6_wgmma", "k7_new"),
    "float64": ("k5_dmma",),
}
OLD = dict(time="2026-01-01T00:00:00Z", commit="old")


def measured() -> list[rows.Row]:
    """Rows of each direction and arithmetic at full size and of sweeps, some old, some frozen."""
    drawn, found = random.Random(5), []

    def add(what, direction, dtype, precision, rung, **values):
        gap = None if direction != FORWARD else drawn.uniform(0.5, 9)
        made = dict(direction=direction, dtype=dtype, slower=drawn.uniform(1.1, 9), **values)
        made |= dict(relerr=drawn.uniform(1e-7, 4e-7), cudnn_relerr=drawn.choice((0.0, 3e-7)) if rung else 0.0)
        made |= dict(cudnn_ms_p50=drawn.uniform(0.1, 9), conv1d_ms_p50=gap)
        one = samples.row(what, rung, **made, precision=peak_name(DTYPES[dtype], precision))
        found.append(replace(one, precision=precision))

    for direction in DIRECTIONS:
        for dtype, precision in ARITHMETICS if direction == FORWARD else ARITHMETICS[1:2]:
            for name in NAMES:
                rungs = RUNGS[precision] if direction == FORWARD else ()
                for rung in (*rungs, "auto", "cudnn"):
                    values = OLD if drawn.random() < 0.3 else {}
                    add(name, direction, dtype, precision, rung, **values)
                if direction == FORWARD and drawn.random() < 0.5:
                    add(name, direction, dtype, precision, "auto", weights="frozen")
            for length in (255, 256, 257, 1024, 4096) if precision == "tf32" else ():
                for name in SWEPT if direction == FORWARD else SWEPT[:1]:
                    at = workloads.at_length(workloads.get(name), length, 16)
                    for rung in (*RUNGS[precision][:2], "auto"):
                        add(at, direction, dtype, precision, rung)
    unknown = samples.row("small", "auto", precision="tf32")
    found += [replace(unknown, workload=name) for name in ("new", "c4to6k3s2")]
    found += [samples.row("small", "k1_gather", gpu="another"), samples.row("kb79", "k5_mma", weights="frozen")]
    return [*found, samples.row("small", "auto", roofline=None, direction="grad_bias")]


def searched() -> list[search.Tried]:
    """Every configuration of three layers, off the prediction, and which is taken."""
    drawn, found = random.Random(6), []
    for name, precision in (("kb64", "tf32"), ("small", "tf32"), ("dac_u1", "bf16")):
        problem = workloads.get(name).problem
        common = dict(time=samples.WHERE["time"], commit="c", gpu="NVIDIA H200", workload=name, precision=precision)
        for config in configs(problem, precision):
            ms = cost(problem, config, H200) * drawn.uniform(0.6, 2)
            chosen = config == choose_whole(problem, precision)
            found.append(search.Tried(**common, **search.described(config), chosen=chosen, ms_p50=ms))
    return found


def studied() -> dict[Path, list]:
    """Rows of the studies, by file."""
    drawn = random.Random(7)

    def faster(make, *names, **values):
        ours, theirs = drawn.uniform(1, 9), drawn.uniform(5, 90)
        return make(**values, **dict(zip(names, (ours, theirs), strict=True)))

    ms, us = ("ms_p50", "torch_ms_p50"), ("us_p50", "by_hand_us_p50")
    batch = ("dac", "encodec", "bigvgan_v2_24khz", "bigvgan_v2_44khz", "unknown")
    modes = [
        faster(samples.in_mode, *ms, decoder=name, mode=mode, dtype=dtype, batch=n, activations=72 * ("v2" in name))
        for name in batch for dtype in ("bfloat16", "float32") for n in (4, 1) for mode in ("graph", "eager")
    ]  # fmt: skip
    modes += [replace(modes[0], time=OLD["time"], ms_p50=0.5), replace(modes[1], seconds=1.0)]
    whole = [
        faster(samples.timed, *ms, decoder=name, dtype=dtype, batch=n, weights=weights, wall_ms_p50=wall,
               torch_wall_ms_p50=12.0)
        for name in ("vits", "unknown", "dac") for dtype in ("bfloat16", "float32")
        for n, weights, wall in ((1, "call", None), (4, "frozen", 3.0))
    ]  # fmt: skip
    acts = [
        faster(samples.activated, *ms, direction=direction, dtype=dtype, channels=channels, length=length)
        for direction in ("step", FORWARD) for dtype in ("bfloat16", "float32")
        for channels, length in ((24, 96_000), (768, 3000), (24, 5000))
    ]  # fmt: skip
    acts += [faster(samples.activated, *ms, batch=1), faster(samples.activated, *ms, gpu="another")]
    steps = [
        faster(samples.stepped, *us, layer=layer, dtype=dtype, batch=n, frames=frames, mode=mode)
        for layer in ("unknown", "encodec_2", "mimi_1") for dtype in ("bfloat16", "float32") for n in (8, 1)
        for frames in (4, 1) for mode in ("graph", "eager")
    ]  # fmt: skip
    steps += [samples.stepped(gpu="another"), samples.stepped("mimi_2", frames=2)]
    results = [faster(samples.result, "ms_mean", "torch_ms_mean", problem=n, passed=n % 5) for n in (79, 64)]
    results += [samples.result(74, gpu="another", weights="frozen", trials=4), samples.result(64, **OLD)]
    short = [
        replace(samples.row(at, rung, slower=drawn.uniform(1, 9), direction=way), dtype=dtype, precision=precision)
        for name in ("hifigan_u1", "dac_u1") for length in (64, 32)
        for at in [workloads.at_length(workloads.get(name), length, 16)]
        for dtype, precision in ARITHMETICS[1:3]
        for rung, way in (("k6_wgmma", FORWARD), ("auto", FORWARD), ("auto", "step"))
        if (length, rung) != (32, "k6_wgmma")
    ]  # fmt: skip
    short += [replace(short[0], gpu="another"), replace(short[1], weights="frozen", workload="new@batch16")]
    return {
        decoder_modes.FILE: modes, decoder_times.FILE: whole, activations.FILE: acts, streaming.FILE: steps,
        kernelbench.FILE: results, segments.FILE: short, search.FILE: searched(),
    }  # fmt: skip


def pages() -> dict[str, dict[str, str]]:
    """The tables of all pages, and a line of each kind of row, by number of line."""
    recorded, studies = measured(), studied()
    with tempfile.TemporaryDirectory() as folder:
        for path, some in {Path("rows.csv"): recorded, **studies}.items():
            rows.replace(Path(folder, path), some, type(some[0]))
        found = readme.tables(folder)
    kinds = {activations: 0, decoder_modes: 1, decoder_times: 2, streaming: 3}
    said = [of.describe(studies[of.FILE][at]) for of, at in kinds.items()]
    spread = replace(recorded[-2], ms_p80=9.0)
    said += [commands.describe(one) for one in (recorded[0], spread, *recorded[-8:])]
    found |= {"described": "\n".join(said), "ten, in lines": "\n".join(summary.lines(recorded))}
    return {name: {str(at): line for at, line in enumerate(text.splitlines())} for name, text in found.items()}


def pictures() -> dict[str, dict[str, str]]:
    """Labels, limits and drawn points of every figure."""
    recorded, studies = measured(), studied()
    live = [replace(one, gpu="another", ms_p50=0.8 * one.ms_p50) for one in recorded if one.workload == "kb74@batch16"]
    planned = figures.plans(recorded, live, studies[search.FILE], studies[decoder_modes.FILE])
    with matplotlib.rc_context(figures.STYLE), mock.patch.dict(style._new, clear=True):
        return {name: {"planned": plan.title} | _figure(plan.draw()) for name, plan in planned.items()}


def _figure(figure: Figure) -> dict[str, str]:
    around = dict(above=figure.get_suptitle(), below=figure.get_supxlabel(), left=figure.get_supylabel())
    for legend in figure.legends:
        labels = [text.get_text() for text in legend.get_texts()]
        around["legend"] = f"{legend.get_title().get_text()} {labels}"
    return around | {f"{at} {name}": text for at, axes in enumerate(figure.axes) for name, text in _panel(axes).items()}


def _panel(axes: Axes) -> dict[str, str]:
    found = dict(title=axes.get_title(), visible=str(axes.get_visible()), aspect=str(axes.get_aspect()))
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        low, high = limits = axis.get_view_interval()
        texts = [axis.get_major_formatter()(one) for one in (low, 0.25, 1.0, 2.0**14, high)]
        ticks = _numbers(axis.get_major_locator().tick_values(*sorted(limits)))
        labels = [text.get_text() for text in axis.get_ticklabels()] if axis.get_scale() == "linear" else []
        found[name] = f"{axis.get_label_text()} {axis.get_scale()} {_numbers(limits)} {texts} {ticks} {labels}"
        found[name] += f" {type(axis.get_minor_formatter()).__name__}"
    for at, line in enumerate(axes.lines):
        look = f"{line.get_label()} {line.get_marker()} {line.get_linestyle()} {line.get_markerfacecolor()}"
        found[f"line {at}"] = f"{look}: {_points(line.get_xydata())}"
    bars = [(bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in axes.patches]
    spans = [end for of in axes.collections for one in of.get_segments() for end in one]
    texts = [f"{text.get_text()} {_numbers(getattr(text, 'xy', text.get_position()))}" for text in axes.texts]
    legend = axes.get_legend()
    labels = [text.get_text() for text in legend.get_texts()] if legend else []
    return found | dict(bars=_points(bars), spans=_points(spans), texts="; ".join(texts), legend=str(labels))


def _points(some: Iterable) -> str:
    return " ".join(map(_numbers, some))


def _numbers(some: Iterable[float]) -> str:
    return f"({', '.join(f'{one:.4g}' if not isinstance(one, str) else one for one in some)})"
