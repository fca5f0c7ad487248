"""Figures and tables are drawn from rows alone, labelled, reproducible, and in step with the recorded rows."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb

from numba_tconv.lab.measure import rows, search, workloads
from numba_tconv.lab.report import figures as plotting
from numba_tconv.lab.report import tables as table
from numba_tconv.lab.report.figures import by_length, words
from numba_tconv.lab.report.figures.style import LADDER, MARKERS, look
from numba_tconv.lab.studies import decoder_times
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
    return [one for n in lengths for one in of_direction(direction, workloads.at_length(workloads.get("kb64"), n))]


def text_of(path: Path) -> str:
    """An SVG's text, which the style keeps as text."""
    return path.read_text(encoding="utf-8")


def test_one_figure_a_sweep_and_those_at_full_size_each_as_svg_and_png(tmp_path):
    recorded = [*sweep(), *sweep(batch=16), *ladder("kb64"), *ladder("depthwise")]
    paths = plotting.draw_all(recorded, tmp_path / "new")
    names = ("throughput_kb64_total_float32_ieee", "throughput_kb64_batch16_float32_ieee", "roofline_float32_ieee")
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
    paths = plotting.draw_all([*recorded, *sweep(), *swept("grad_input")], tmp_path_factory.mktemp("plots"))
    return {path.stem: path for path in paths if path.suffix == ".svg"}


def test_every_direction_has_its_own_figures(every_direction):
    gradients = ("", "_grad_input", "_grad_weight")
    assert set(every_direction) == {
        *(f"roofline{direction}_float32_ieee" for direction in (*gradients, "_step")),
        *(f"errors{direction}" for direction in (*gradients, "_step")),
        *(f"intensity{direction}" for direction in gradients),
        *(f"throughput_kb64_total{direction}_float32_ieee" for direction in ("", "_grad_input")),
        "ladder_float32",
    }
    for name, path in every_direction.items():
        direction = next((other for other in DIRECTIONS[1:] if other in name), "forward")
        svg = text_of(path)
        assert f"{direction}, float32 ieee" in svg or (f"{direction}; NVIDIA H200" in svg and "float32 ieee" in svg)
        assert all(f">{rung}</text>" in svg for rung in {row.rung for row in of_direction(direction)} - {"auto"})
        everything = name.startswith(("roofline", "throughput"))
        assert (">conv1d</text>" in svg) == (direction == "forward" and everything)
        assert (">auto</text>" in svg) == (direction == "step")


@pytest.mark.thorough
def test_forward_is_drawn_as_if_it_were_alone(tmp_path, every_direction):
    for path in plotting.draw_all([*of_direction("forward"), *sweep()], tmp_path):
        if path.suffix == ".svg":
            assert path.read_bytes() == every_direction[path.stem].read_bytes()


def test_rungs_of_a_gradient_can_be_told_apart():
    for of in ("grad_input", "grad_weight"):
        looks = [(look["color"], look["marker"]) for look in map(look, rungs_of(of))]
        assert len(set(looks)) == len(looks)


def test_every_line_is_labelled_and_gpu_and_date_stand_below(tmp_path):
    svg = text_of(plotting.draw_all(sweep(), tmp_path)[0])
    for label in (*SLOWER, "cuDNN", "conv1d", "roofline"):
        assert svg.count(f">{label}</text>") == 2, label  # once a panel
    for label in (
        "GB/s",
        "TFLOP/s",
        "NVIDIA H200",
        "2026-01-02",
        "numba-cuda 0.30.4",
        "commit 0123abc",
        "batch x length fixed",
    ):
        assert label in svg, label


def test_shares_name_workloads_and_contestants(tmp_path):
    svg = text_of(plotting.draw_all([*ladder("kb64"), *ladder("kb79", conv1d_ms_p50=None)], tmp_path)[0])
    for label in (*SLOWER, "cuDNN", "conv1d", "kb64", "kb79", "NVIDIA H200", "2026-01-02"):
        assert label in svg, label


def test_live_rows_are_drawn_beside_the_recorded_ones(tmp_path):
    live = [replace(one, gpu="Another GPU", time="2026-05-06T00:00:00Z") for one in sweep()]
    svg = text_of(plotting.draw_all(sweep(), tmp_path, live)[0])
    for label in ("k4_register_tile", "k4_register_tile, live", "live: Another GPU", "2026-05-06"):
        assert label in svg, label


def test_live_rows_alone_and_without_a_roofline(tmp_path):
    live = [replace(one, roofline=None, conv1d_ms_p50=None) for one in sweep()]
    svg = text_of(plotting.draw_all([], tmp_path, live)[0])
    assert ">roofline</text>" not in svg
    assert ">conv1d</text>" not in svg
    assert svg.count(">cuDNN</text>") == 2


def test_files_that_would_not_change_are_left_alone(tmp_path):
    def written():
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.iterdir()}

    paths = plotting.draw_all(ladder(), tmp_path)
    before = written()
    assert len(paths) == len(before)
    assert plotting.draw_all(ladder(), tmp_path) == []
    assert written() == before
    plotting.draw_all([replace(one, roofline=one.roofline / 2) for one in ladder()], tmp_path)
    changed = {name for name, what in written().items() if what != before[name]}
    assert "roofline_float32_ieee.svg" in changed
    assert "errors.svg" not in changed


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


def test_no_rows_no_figures(tmp_path):
    assert plotting.draw_all([], tmp_path) == []


def test_an_unwritable_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(rows.RowsError, match=r"cannot write .*file"):
        plotting.draw_all(ladder(), tmp_path / "file")


def test_rungs_can_be_told_apart_in_grey():
    def lightness(color):
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color))
        luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        return 116 * luminance ** (1 / 3) - 16

    steps = [lightness(color) for color in LADDER]
    assert all(lighter - darker > 6 for lighter, darker in pairwise(steps))
    assert len(set(MARKERS)) == len(MARKERS) == len(LADDER)


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
    """A table column's cells by workload; empty without the column."""
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
    timed = rows.existing(data / decoder_times.FILE, decoder_times.Timed)
    planned = plotting.plans(rows.read_all(data), searched=search.read(data / search.FILE), timed=timed)
    there = {path.stem for path in (ROOT / "plots").glob("*.svg")} & {
        path.stem for path in (ROOT / "plots").glob("*.png")
    }
    assert set(planned) == there, "run `make figures`, and remove what is drawn no more"


def test_neighbours_of_powers_of_two_are_not_drawn():
    def lengths(figure):
        return {x for line in figure.axes[0].lines for x in line.get_xdata()}

    beside = ladder(workloads.at_length(workloads.get("kb64"), 2**14 + 1, 16))
    assert lengths(by_length.throughput([*sweep(16), *beside])) == {2**10, 2**14, 2**20}
    assert lengths(by_length.throughput(beside)) == {2**14 + 1}
