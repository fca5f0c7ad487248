"""Figures and tables are drawn from rows alone, labelled, reproducible, and in step with the recorded rows."""

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.colors import to_rgb

from numba_tconv.lab.measure import rows, search, workloads
from numba_tconv.lab.report import figures as plotting
from numba_tconv.lab.report import tables as table
from numba_tconv.lab.report.figures import by_length, words
from numba_tconv.lab.report.figures.style import AUTO, CONV1D, CUDNN, LADDER, MARKERS, NEW, TORCH, look
from numba_tconv.lab.studies import decoder_modes
from numba_tconv.selection.directions import DIRECTIONS, rungs_of
from tests.samples import SLOWER, ladder, row, sweep

ROOT = Path(__file__).parents[2]


def of_direction(direction, workload="kb64"):
    """Rows of the direction's rungs, the later the faster, and of ``auto``."""
    values = dict(direction=direction) | ({} if direction == "forward" else dict(conv1d_ms_p50=None))
    names = SLOWER if direction == "forward" else ([] if direction == "step" else rungs_of(direction))
    made = [row(workload, name, slower=9.0 - number, **values) for number, name in enumerate(names)]
    return [*made, row(workload, "auto", slower=1.4, **values)]


def swept(direction):
    lengths = (2**10, 2**14)
    return [one for n in lengths for one in of_direction(direction, workloads.at_length(workloads.get("kb64"), n, 16))]


def text_of(path: Path) -> str:
    """An SVG's text, which the style keeps as text."""
    return path.read_text(encoding="utf-8")


def drawn(recorded, name, folder: Path) -> str:
    """One figure's SVG."""
    with rc_context(plotting.STYLE):
        plotting.plans(recorded)[name].draw().savefig(folder / "one.svg", metadata={"Date": None})
    return text_of(folder / "one.svg")


def test_one_figure_a_sweep_and_those_at_full_size_each_as_svg_and_png(tmp_path):
    recorded = [*sweep(), *ladder("kb64"), *ladder("depthwise")]
    paths = plotting.draw_all(recorded, tmp_path / "new")
    names = ("throughput_batch16_float32_ieee", "roofline_float32_ieee")
    names += ("errors", "intensity", "ladder_float32")
    assert [path.name for path in paths] == [f"{name}.{kind}" for name in names for kind in ("svg", "png")]
    assert all(path.stat().st_size > 5000 for path in paths)


def test_one_length_is_no_sweep(tmp_path):
    (alone,) = workloads.expand(["kb64"], batch=1)
    assert plotting.draw_all([row(alone)], tmp_path) == []


@pytest.fixture(scope="module")
def every_direction(tmp_path_factory):
    """SVG figures of all directions at full size, of a forward sweep and of a gradient's."""
    recorded = [one for direction in DIRECTIONS for one in of_direction(direction)]
    paths = plotting.draw_all([*recorded, *sweep(16), *swept("grad_input")], tmp_path_factory.mktemp("plots"))
    return {path.stem: path for path in paths if path.suffix == ".svg"}


@pytest.mark.thorough
def test_every_direction_has_its_own_figures(every_direction):
    gradients = ("", "_grad_input", "_grad_weight")
    assert set(every_direction) == {
        *(f"roofline{direction}_float32_ieee" for direction in (*gradients, "_step")),
        *(f"throughput_batch16{direction}_float32_ieee" for direction in ("", "_grad_input")),
        *("errors", "intensity", "ladder_float32"),
    }
    for name, path in every_direction.items():
        if name == "errors":
            continue
        direction = next((other for other in DIRECTIONS[1:] if other in name), "forward")
        svg = text_of(path)
        assert "float32 ieee" in svg
        drawn = name.startswith(("roofline", "ladder", "intensity")) and direction == "forward"
        assert all(f">{rung}</text>" in svg for rung in SLOWER) or not drawn
        assert (">conv1d</text>" in svg) == (direction == "forward" and name.startswith("roofline"))
    assert all(f">{direction}</text>" in text_of(every_direction["errors"]) for direction in DIRECTIONS)


@pytest.mark.thorough
def test_forward_is_drawn_as_if_it_were_alone(tmp_path, every_direction):
    for path in plotting.draw_all([*of_direction("forward"), *sweep(16)], tmp_path):
        if path.suffix == ".svg" and path.stem != "errors":
            assert path.read_bytes() == every_direction[path.stem].read_bytes()


def test_rungs_of_a_gradient_can_be_told_apart():
    for of in ("grad_input", "grad_weight"):
        looks = [(look["color"], look["marker"]) for look in map(look, rungs_of(of))]
        assert len(set(looks)) == len(looks)


def test_every_curve_is_labelled_and_gpu_and_date_stand_below(tmp_path):
    svg = text_of(plotting.draw_all(sweep(16), tmp_path)[0])
    for label in (*SLOWER, "torch", "roofline"):
        assert svg.count(f">{label}</text>") == 1, label
    for label in ("times as fast as torch", "samples of output", "NVIDIA H200", "2026-01-02", "numba-cuda 0.30.4"):
        assert label in svg, label
    assert "0123abc" not in svg


def curves_of(axes):
    return dict(zip([label for _, label in axes.curves], [list(map(tuple, one.get_xydata())) for one in axes.lines],
                    strict=True))  # fmt: skip


def test_curves_are_speed_ups_of_each_row_over_the_faster_of_torchs_two():
    of = {name: workloads.get(name) for name in ("hifigan_u1", "kb64", "depthwise")}
    recorded = [
        one
        for layer in of.values()
        for samples in (2**10, 2**15)
        for one in ladder(workloads.at_length(layer, samples // layer.problem.stride, 16))
    ]
    figure = plotting.plans(recorded)["throughput_batch16_float32_ieee"].draw()
    assert [axes.get_title() for axes in figure.axes if axes.get_visible()] == ["kb64", "hifigan_u1", "depthwise"]
    for axes in figure.axes:
        curves = curves_of(axes)
        assert list(curves) == [*SLOWER, "roofline", "torch"]
        for rung, slower in SLOWER.items():
            assert curves[rung] == [(2**10, pytest.approx(1.6 / slower)), (2**15, pytest.approx(1.6 / slower))]
        assert curves["roofline"] == [(2**10, pytest.approx(1.6)), (2**15, pytest.approx(1.6))]
        assert all(low <= y <= high for low, high in [axes.get_ylim()] for one in curves.values() for _, y in one)


def test_a_panel_without_a_layer_is_hidden(monkeypatch):
    monkeypatch.setattr(by_length, "COLUMNS", 2)
    names = ("kb64", "kb74", "kb79")
    layers = [workloads.at_length(workloads.get(name), n, 16) for name in names for n in (2**10, 2**12)]
    figure = plotting.plans([row(one) for one in layers])["throughput_batch16_float32_ieee"].draw()
    assert [axes.get_visible() for axes in figure.axes] == [True, True, True, False]


def test_the_selection_is_drawn_where_no_rung_is_as_fast():
    def labels(*recorded):
        (axes,) = plotting.plans(recorded)["roofline_float32_ieee"].draw().axes
        return {
            line.get_label(): list(line.get_ydata()) for line in axes.lines if line.get_marker() not in ("", "None")
        }

    names = ("kb64", "kb79", "mimi")
    rungs, selected = [row(name) for name in names[:2]], [row(name, "auto", slower=1.38) for name in names]
    assert labels(*rungs, *selected)["auto"] == [2]  # mimi has no other row
    faster = replace(selected[1], ms_p50=selected[1].ms_p50 / 1.5)
    assert labels(*rungs, selected[0], faster, selected[2])["auto"] == [1, 2]
    assert "auto" not in labels(*rungs, *selected[:2])


def test_shares_name_workloads_and_contestants(tmp_path):
    svg = drawn([*ladder("kb64"), *ladder("kb79", conv1d_ms_p50=None)], "roofline_float32_ieee", tmp_path)
    for label in (*SLOWER, "cuDNN", "conv1d", "kb64", "kb79", "NVIDIA H200", "2026-01-02"):
        assert label in svg, label


def test_live_rows_are_drawn_beside_the_recorded_ones(tmp_path):
    live = [replace(one, gpu="Another GPU", time="2026-05-06T00:00:00Z") for one in sweep(16)]
    svg = text_of(plotting.draw_all(sweep(16), tmp_path, live)[0])
    for label in ("k4_register_tile", "k4_register_tile, live", "live: Another GPU", "2026-05-06"):
        assert label in svg, label


def test_live_rows_alone_and_without_a_roofline(tmp_path):
    live = [replace(one, roofline=None, conv1d_ms_p50=None) for one in sweep(16)]
    svg = text_of(plotting.draw_all([], tmp_path, live)[0])
    assert ">roofline</text>" not in svg
    assert svg.count(">torch</text>") == 1


def test_weights_that_were_packed_before_the_call_are_named_below():
    frozen = [replace(one, weights="frozen") if one.rung == "k4_register_tile" else one for one in ladder()]
    assert words.measured_on(frozen).endswith("; weights packed before the call: k4_register_tile")
    assert "packed" not in words.measured_on(ladder())


def test_rows_of_the_default_call_are_drawn_before_frozen_ones():
    frozen = [replace(one, weights="frozen", ms_p50=1.0, time="2026-12-01T00:00:00Z") for one in ladder()]
    (axes, *_) = plotting.plans([*ladder(), *frozen])["roofline_float32_ieee"].draw().axes
    assert {line.get_label(): line.get_xdata()[0] for line in axes.lines if line.get_label() in SLOWER} == {
        name: pytest.approx(1 / slower) for name, slower in SLOWER.items()
    }


def test_figures_are_of_the_gpu_with_the_most_rows():
    def shares(*recorded):
        (axes, *_) = plotting.plans(recorded)["roofline_float32_ieee"].draw().axes
        return {line.get_label(): [*line.get_xdata()] for line in axes.lines}

    newer = row(gpu="another", slower=0.1, time="2026-12-01T00:00:00Z")
    assert shares(*ladder(), newer) == shares(*ladder())


@pytest.mark.parametrize("recorded", [[], [row(rung="cudnn")]], ids=["none", "torch's own"])
def test_no_rows_no_figures(tmp_path, recorded):
    assert plotting.draw_all(recorded, tmp_path) == []


def test_progress_is_out_of_all_figures(tmp_path, monkeypatch):
    totals = []
    monkeypatch.setattr(plotting, "plans", lambda *_: dict.fromkeys("abc", SimpleNamespace(draw=lambda: None)))
    monkeypatch.setattr(plotting, "progress", lambda items, label, total: totals.append(total) or items)
    assert plotting.draw_all([], tmp_path) == []
    assert totals == [3]


GREY_APART, COLOR_APART = 6, 8  # CIE lightness; CIELAB distance, of which 2.3 is just noticeable
# Machado, Oliveira and Fernandes 2009: full protanopia, deuteranopia and tritanopia, of linear RGB.
BLIND = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(color, seen=None):
    """CIELAB of a colour, as somebody with ``seen`` sees it."""
    linear = np.array([c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)])
    linear = np.clip(np.array(BLIND[seen]) @ linear, 0, 1) if seen else linear
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ linear / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_rungs_can_be_told_apart_in_grey():
    steps = [lab(color)[0] for color in LADDER]
    assert all(lighter - darker > GREY_APART for lighter, darker in pairwise(steps))
    assert len(set(MARKERS)) == len(MARKERS) == len(LADDER)


@pytest.mark.parametrize("seen", [None, *BLIND])
def test_contestants_can_be_told_apart_by_the_colour_blind(seen):
    """By colour or, of rungs that are no neighbours on the ladder and of others, by marker or dashes."""
    ladders = [dict(color=color, marker=marker, linestyle="-") for color, marker in zip(LADDER, MARKERS, strict=True)]
    others = [look("depthwise"), AUTO, CUDNN, CONV1D, *(dict(color=c, marker=m, linestyle="-") for c, m in NEW)]
    for one, other in combinations([*ladders, *others], 2):
        far = np.linalg.norm(lab(one["color"], seen) - lab(other["color"], seen)) > COLOR_APART
        assert far or (one["marker"], one["linestyle"]) != (other["marker"], other["linestyle"])
    for one, other in pairwise(ladders):
        assert np.linalg.norm(lab(one["color"], seen) - lab(other["color"], seen)) > COLOR_APART
    for one in ladders:
        assert np.linalg.norm(lab(one["color"], seen) - lab(TORCH["color"], seen)) > 3 * COLOR_APART


def test_a_new_rung_has_a_look_of_its_own():
    looks = [(look(name)["color"], look(name)["marker"]) for name in ("k2_polyphase", "k2_by_2", "k2_by_4", "mine")]
    assert len(set(looks)) == 4
    assert look("k2_by_2") == look("k2_by_2")


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_holds_the_newest_rows_at_full_size():
    old = [replace(one, time="2025-01-01T00:00:00Z", ms_p50=99.0) for one in ladder()]
    rendered = table.render([*ladder(), *old, *sweep()])
    (line,) = [line for line in rendered.splitlines() if line.startswith("| kb64")]
    floor = row().floor_ms
    times = [f"{floor * slower:.3g}" for slower in (*SLOWER.values(), 2.5, 1.6, 1.0)]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == [*times, "71%", "1.14x"]
    assert "99" not in rendered
    assert "@" not in rendered


def test_a_speed_up_is_over_the_faster_opponent_of_the_same_run():
    other = row(rung="k1_gather", slower=5.0, cudnn_ms_p50=1.0)
    rendered = table.render([row(rung="k4_register_tile", slower=2.0), other])
    assert "0.80x" in rendered  # conv1d takes 1.6 floors, cuDNN 2.5


def test_precisions_have_their_own_tables_and_torchs_own_row_has_no_speed_up():
    rendered = table.render([*ladder(), row(rung="cudnn", slower=2.5, precision="tf32")])
    ieee, tf32 = rendered.split("### forward, float32, tf32, NVIDIA H200")
    assert "speed-up" in ieee
    assert "speed-up" not in tf32
    assert "| kb64" in tf32


def test_every_direction_has_its_own_table_after_the_forward_pass():
    recorded = [one for direction in reversed(DIRECTIONS) for one in of_direction(direction, "kb64")]
    rendered = table.render(recorded)
    titles = [line.split(",")[0] for line in rendered.splitlines() if line.startswith("###")]
    assert titles == ["### forward", "### grad_input", "### grad_weight", "### step"]
    forward, *others = rendered.split("\n\n### ")[1:]
    forward = f"## Tables: NVIDIA H200\n\n### {forward}"
    assert forward == table.render(of_direction("forward", "kb64"))
    for direction, part in zip(DIRECTIONS[1:], others, strict=True):
        header, _, line = part.splitlines()[4:]
        names = sorted({one.rung for one in of_direction(direction)} - {"auto"})
        columns = [cell.strip() for cell in header.split("|")[1:-1]]
        assert columns == ["workload", *names, "auto", "cuDNN", "floor", "of floor", "speed-up"]
        assert line.split("|")[-2].strip() == "1.79x"  # torch takes 2.5 floors, the fastest 1.4


def cells_of_column(rendered, name):
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in rendered.splitlines() if line[:1] == "|"]
    header, _, *lines = lines
    return {line[0]: line[header.index(name)] for line in lines} if name in header else {}


def test_every_gpu_has_its_own_section_that_with_the_most_rows_first():
    rendered = table.render([row(gpu="another"), *ladder()])
    assert [line for line in rendered.splitlines() if line.startswith("## ")] == [
        "## Tables: NVIDIA H200", "## Tables: another"
    ]  # fmt: skip
    assert "### forward, float32, ieee, another" in rendered.partition("## Tables: another")[2]


def test_times_of_frozen_weights_are_marked_and_explained():
    frozen = replace(row(rung="k5_mma"), weights="frozen")
    rendered = table.render([frozen, row(rung="k4_register_tile")])
    assert cells_of_column(rendered, "k5_mma")["kb64"].endswith("*")
    assert not cells_of_column(rendered, "k4_register_tile")["kb64"].endswith("*")
    assert table.note([frozen]) in rendered
    assert "*" not in table.render(ladder())


def test_frozen_weights_stand_beside_the_default_call_where_that_makes_a_difference():
    auto = [row(name, "auto", slower=1.4) for name in ("kb64", "kb79", "kb74", "dac_u1")]
    frozen = [replace(one, weights="frozen") for one in auto]
    faster, same, older, newer = frozen
    faster = replace(faster, ms_p50=0.5 * faster.ms_p50)
    same = replace(same, ms_p50=0.99 * same.ms_p50)
    older = replace(older, ms_p50=1.0, time="2025-01-01T00:00:00Z", commit="old")
    newer = replace(newer, ms_p50=2.0, time="2026-03-01T00:00:00Z", commit="new")
    rendered = table.render([*auto, faster, same, older, newer])
    assert cells_of_column(rendered, "frozen") == {
        "kb64": f"{faster.ms_p50:.3g}",
        "kb79": "-",
        "kb74": "-",
        "dac_u1": "2",
    }
    assert cells_of_column(rendered, "auto")["kb64"] == f"{auto[0].ms_p50:.3g}"
    assert cells_of_column(table.render([*auto, same, older]), "frozen") == {}


@pytest.mark.parametrize(
    ("of_rung", "of_auto", "left_out"),
    [
        (dict(slower=2.0, time="2026-01-01T00:00:00Z", commit="old"), 1.4, True),
        (dict(slower=1.1, time="2026-01-01T00:00:00Z", commit="old"), 1.4, True),
        (dict(slower=1.45, time="2026-01-01T00:00:00Z", commit="old"), 1.4, False),
        (dict(slower=2.0, time="2026-01-01T00:00:00Z"), 1.4, False),
        (dict(slower=2.0, time="2026-01-03T00:00:00Z", commit="new"), 1.4, False),
    ],
    ids=["the kernel got faster", "and slower", "as fast", "of the same commit", "newer"],
)
def test_rungs_that_are_older_than_what_the_selection_took_are_left_out(of_rung, of_auto, left_out):
    measured = [row(rung="k4_register_tile", **of_rung), row(rung="auto", slower=of_auto)]
    rendered = table.render([*measured, row("kb79", "k4_register_tile"), row("kb79", "auto")])
    assert (cells_of_column(rendered, "k4_register_tile")["kb64"] == "-") == left_out
    assert cells_of_column(rendered, "k4_register_tile")["kb79"] != "-"
    alone = table.render(measured)
    assert ("k4_register_tile" in alone) != left_out, "a column without times"


def test_no_rows_say_so():
    assert table.render([]) == table.EMPTY


def test_every_figure_of_the_recorded_rows_is_there():
    data = ROOT / "plots" / "data"
    timed = rows.existing(data / decoder_modes.FILE, decoder_modes.Timed)
    searched = rows.existing(data / search.FILE, search.Tried)
    planned = plotting.plans(rows.read_all(data), searched=searched, timed=timed)
    there = {path.stem for path in (ROOT / "plots").glob("*.svg")} & {
        path.stem for path in (ROOT / "plots").glob("*.png")
    }
    assert set(planned) == there, "run `make figures`, and remove what is drawn no more"
