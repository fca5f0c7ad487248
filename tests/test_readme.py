"""README.md and plots/README.md against the recorded rows: the text between their markers is in step."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.lab.measure import rows, workloads
from numba_tconv.lab.report import claim, ladder, readme, segments, summary
from numba_tconv.lab.report import figures as plotting
from numba_tconv.lab.report import tables as table
from numba_tconv.lab.studies import activations, decoder_modes, decoder_times, kernelbench, streaming
from numba_tconv.selection.registry import RUNGS

from .samples import EMPTY_README, activated, in_mode, result, row, stepped, sweep, timed
from .samples import ladder as of_ladder

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": readme.FRONT, "plots/README.md": readme.RESULTS}
NAMES = (*readme.FRONT, *readme.RESULTS)


@pytest.fixture(scope="module")
def recorded_tables():
    return readme.tables(ROOT / "plots" / "data")


@pytest.mark.parametrize(("page", "name"), [(page, name) for page, names in PAGES.items() for name in names])
def test_pages_show_the_recorded_rows(recorded_tables, page, name):
    section = readme.section((ROOT / page).read_text(encoding="utf-8"), name)
    assert section == recorded_tables[name], "run `make figures`"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_every_section_stands_on_one_page(recorded_tables):
    assert sorted(recorded_tables) == sorted(NAMES)


def test_tables_are_of_the_rows_of_their_files(tmp_path):
    empty = dict.fromkeys(NAMES, table.EMPTY) | {"ladder": ladder.render([])}
    empty |= dict.fromkeys(("figures", "modes", "activations", "segments", "streaming"), "")
    assert readme.tables(tmp_path) == empty
    measured = [*of_ladder(), row(rung="auto", precision="tf32")]
    rows.append(tmp_path / "some.csv", measured)
    rows.append(tmp_path / kernelbench.FILE, [result()], kernelbench.Result)
    rows.append(tmp_path / decoder_times.FILE, [timed()], decoder_times.Timed)
    rows.append(tmp_path / decoder_modes.FILE, [in_mode()], decoder_modes.Timed)
    rows.append(tmp_path / activations.FILE, [activated()], activations.Timed)
    steps = [stepped(), stepped(mode="eager", us_p50=50.0), stepped(us_p50=1.0, time="2020-01-01T00:00:00Z")]
    rows.append(tmp_path / streaming.FILE, steps, streaming.Timed)
    short = [row("hifigan_u1", "auto", precision="tf32", length=32)]
    rows.append(tmp_path / segments.FILE, short)
    assert readme.tables(tmp_path) == {
        "claim": claim.render(measured, [in_mode()], steps),
        "ladder": ladder.render(measured),
        "ten": summary.ten(measured),
        "precision": summary.precisions(measured),
        "figures": readme.figures(plotting.plans(measured, timed=[in_mode()])),
        "tables": table.render(measured),
        "kernelbench": kernelbench.render([result()]),
        "decoders": decoder_times.render([timed()]),
        "modes": decoder_modes.render([in_mode()]),
        "activations": activations.render([activated()]),
        "segments": segments.render(short),
        "streaming": streaming.render(steps),
    }


ELSEWHERE = dict(gpu="another", time="2027-01-01T00:00:00Z")


def cells_of(page):
    return [cell.strip() for cell in page.splitlines()[-1].strip("|").split("|")]


def test_a_line_of_steps_has_the_newest_times():
    older = stepped(us_p50=1.0, time="2020-01-01T00:00:00Z")
    more = stepped(frames=4, us_p50=20.0), stepped(mode="eager", us_p50=50.0, by_hand_us_p50=60.0)
    page = streaming.render([stepped(), *more, older])
    assert cells_of(page) == ["mimi_1", "float32", "1", "10.0, 3.0x", "20.0, 1.5x", "50.0, 1.2x"]
    assert streaming.render([stepped(), *more, older, stepped(**ELSEWHERE)]) == page
    assert page.startswith("## Streaming\n\nMicroseconds")
    assert "10 us a step (by hand 30), error 3.00e-07 (by hand 2.00e-04)" in streaming.describe(stepped())
    others = [stepped(layer="a new one"), stepped(dtype="bfloat16"), stepped(batch=8), stepped(frames=16)]
    lines = streaming.markdown([*others, stepped()]).splitlines()
    assert "T = 1 | " in lines[0]
    assert "T = 16" in lines[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")][:3] for line in lines[2:]]
    told = [
        ("mimi_1", "float32", "1"),
        ("mimi_1", "float32", "8"),
        ("mimi_1", "bfloat16", "1"),
        ("a new one", "float32", "1"),
    ]
    assert cells == [list(line) for line in told]


def test_a_line_of_short_signals_has_both_ways_and_the_step():
    def timed(rung, ms, torchs, **values):
        values = dict(length=32, precision="tf32") | values
        return row("hifigan_u1", rung, ms_p50=ms, cudnn_ms_p50=torchs, conv1d_ms_p50=None, **values)

    alone, joined = timed("k6_wgmma", 0.09, 0.05), timed("auto", 0.03, 0.04)
    step = timed("auto", 0.2, 0.3, direction="step")
    page = segments.render([alone, joined, step])
    assert cells_of(page) == ["hifigan_u1", "float32, tf32", "32", "0.09", "0.03", "0.04", "0.2", "0.3"]
    assert segments.render([alone, joined, step, replace(alone, **ELSEWHERE)]) == page
    assert cells_of(segments.render([alone])) == ["hifigan_u1", "float32, tf32", "32", "0.09", "-", "-", "-", "-"]
    older = timed("auto", 9.0, 9.0, time="2020-01-01T00:00:00Z")
    half = replace(timed("auto", 0.02, 0.05), dtype="bfloat16", precision="bfloat16")
    lines = segments.render([half, alone, joined, older]).splitlines()
    assert [line.split("|")[2].strip() for line in lines[-2:]] == ["float32, tf32", "bfloat16"]
    assert cells_of("\n".join(lines[:-1])) == ["hifigan_u1", "float32, tf32", "32", "0.09", "0.03", "0.04", "-", "-"]
    assert segments.render([timed("auto", 1.0, None, direction="grad_input")])
    assert segments.render([]) == ""


def test_only_what_is_between_the_markers_changes(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"10 µs before\n{EMPTY_README}after\n", encoding="utf-8")
    tables = {"precision": "some\ntable", "ten": "another", "ladder": "\\1", "claim": "a word"}
    for _ in range(2):
        readme.update(path, tables)
        text = path.read_text(encoding="utf-8")
        assert text.startswith("10 µs before\n<!-- claim:begin -->\na word\n<!-- claim:end -->\n")
        assert "<!-- ten:begin -->\nanother\n<!-- ten:end -->\n" in text
        assert text.endswith("<!-- precision:begin -->\nsome\ntable\n<!-- precision:end -->\nafter\n")
        assert {name: readme.section(text, name) for name in tables} == tables


@pytest.mark.parametrize("missing", ["<!-- ladder:begin -->", "<!-- precision:end -->"])
def test_a_readme_without_a_marker_is_left_alone(tmp_path, missing):
    path = tmp_path / "README.md"
    path.write_text(before := EMPTY_README.replace(missing, ""))
    with pytest.raises(rows.RowsError, match=rf"README.md: the markers .*{missing}.* missing"):
        readme.update(path, dict.fromkeys(readme.FRONT, "new"))
    assert path.read_text() == before


def claimed(*measured):
    return claim.render(measured)


def test_the_claim_is_of_what_the_selection_picks():
    fast, slow = (row(name, "auto", slower=slower, precision="tf32") for name, slower in (("kb64", 0.8), ("kb74", 1.6)))
    others = (
        row(rung="k6_wgmma", slower=0.1, precision="tf32"),
        row(rung="auto", slower=0.1),
        row("kb64", "auto", slower=0.1, precision="tf32", time="2026-01-01T00:00:00Z"),
        row(workloads.at_length(workloads.get("kb64"), 65536, 1), "auto", slower=0.1, precision="tf32"),
        row("kb64", "auto", slower=0.1, precision="tf32", direction="grad_input"),
        row("kb79", "auto", slower=0.1, precision="tf32", gpu="another", time="2026-01-01T00:00:00Z"),
        row("kb64", "auto", slower=0.1, precision="tf32", gpu="another", time="2026-01-02T00:00:00Z"),
    )
    said = claimed(*others, fast, slow)
    assert "conv1d`: **1.4 times as fast in TF32** (2 layers, 1.00 to 2.0)." in said
    assert "NVIDIA H200, driver 580.1" in said
    assert "step" not in said
    assert "bfloat16" not in said


def test_a_step_is_claimed_for_itself():
    of = dict(rung="auto", dtype="bfloat16", precision="bfloat16", conv1d_ms_p50=None)
    made = row(slower=0.5, precision="tf32")
    forward = replace(made, **of)
    step = replace(made, **of, direction="step", ms_p50=2 * made.ms_p50)
    said = claimed(forward, step)
    assert "`conv1d`: **5.0 times as fast in bfloat16** (1 layers, 5.00 to 5.0)." in said
    assert "A training step, against torch's: **2.5 times as fast in bfloat16** (1 layers, 2.50 to 2.5)." in said
    assert claimed(step).startswith("A training step")


def test_the_claim_is_of_default_calls():
    call, other = (row(name, "auto", slower=0.8, precision="tf32") for name in ("kb64", "kb74"))
    frozen, frozen_other = (replace(one, weights="frozen", ms_p50=one.ms_p50 / 2) for one in (call, other))
    assert "frozen" not in claimed(call, other)

    both = claimed(call, other, frozen)
    assert "**2.0 times as fast in TF32** (2 layers, 2.00 to 2.0)" in both
    assert "With frozen weights, where both were timed: 4.0 instead of 2.0 times in TF32 (1 layers)." in both
    assert "**2.0 times as fast in TF32** (1 layers, 2.00 to 2.0)" in claimed(call, frozen_other)


def test_a_whole_decoder_is_claimed_eager_and_at_its_largest_batch():
    of = dict(mode="eager", activations=109, batch=4, ms_p50=10.0, torch_ms_p50=40.0)
    others = (
        in_mode(**of | dict(batch=1, ms_p50=1.0, time="2027-01-01T00:00:00Z")),
        in_mode(**of | dict(activations=72, batch=8, ms_p50=1.0, time="2027-01-01T00:00:00Z")),
        in_mode(**of | dict(mode="graph", ms_p50=1.0)),
        in_mode(**of | dict(activations=0, batch=64, ms_p50=1.0)),
        in_mode(**of | dict(gpu="another", batch=64, ms_p50=1.0)),
        in_mode(**of | dict(ms_p50=1.0, time="2020-01-01T00:00:00Z")),
    )
    half = in_mode(**of | dict(dtype="bfloat16", ms_p50=20.0))
    said = claim.render([row(rung="auto", precision="tf32")], [in_mode(**of), half, *others])
    assert "**4.0 times as fast in TF32, 2.0 times as fast in bfloat16**" in said
    assert "4 inputs of" in said
    assert "weights frozen" in said
    assert "activations" not in claim.render([row(rung="auto", precision="tf32")], others[3:5])


def test_steps_of_one_frame_in_a_graph_are_claimed():
    of = dict(mode="graph", us_p50=10.0, by_hand_us_p50=20.0)
    others = (
        stepped(**of | dict(mode="eager", us_p50=1.0)),
        stepped(**of | dict(frames=4, us_p50=1.0)),
        stepped(**of | dict(gpu="another", us_p50=1.0)),
        stepped(**of | dict(us_p50=1.0, time="2020-01-01T00:00:00Z")),
    )
    steps = stepped(**of), stepped(**of | dict(layer="mimi_2", us_p50=2.5)), *others
    said = claim.render([row(rung="auto", precision="tf32")], (), steps)
    assert "**4.0 times as fast** (2 layers of decoders, 2.0 to 8.0)" in said
    assert "streaming" not in claim.render([row(rung="auto", precision="tf32")], (), others[:3])


def test_nothing_is_claimed_without_rows():
    assert claimed() == claimed(*of_ladder()) == claimed(row(rung="auto")) == table.EMPTY


def cells(rows):
    """The cells of each measured rung: where, how long, and the gain."""
    of_ladder, _, said = ladder.render(rows).partition("\n\n")
    assert said.startswith("Forward, NVIDIA H200, driver 580.1")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in of_ladder.splitlines()[2:]]
    assert len(lines) == len(RUNGS)
    names = [line[0].partition("`]")[0].removeprefix("[`") for line in lines]
    assert names == list(RUNGS)
    assert [line[1] for line in lines] == [rung.idea for rung in RUNGS.values()]
    return {name: line[2:] for name, line in zip(names, lines, strict=True) if line[2:] != ["-", "-"]}


def test_the_ladder_tells_what_each_rung_gained():
    times = dict(k1_gather=1234.5, k2_polyphase=100, k4_register_tile=8.0)
    of_kb64 = [row(rung=rung, ms_p50=ms) for rung, ms in times.items()]
    on_tensor_cores = [
        row(rung="k5_mma", precision="tf32", ms_p50=2.5),
        row(rung="k6_wgmma", precision="tf32", ms_p50=2),
    ]
    beside = [row("depthwise", rung, ms_p50=ms) for rung, ms in (("k4_register_tile", 2), ("depthwise", 0.5))]
    in_float64 = [
        row(rung=rung, dtype="float64", ms_p50=ms, roofline=None)
        for rung, ms in (("k3_shared_tile", 30), ("k4_register_tile", 20), ("k5_dmma", 8))
    ]
    others = [row("kb74", "k3_shared_tile"), *in_float64]
    assert cells([*of_kb64, *on_tensor_cores, *beside, *others]) == {
        "k1_gather": ["kb64: 1230 ms, full precision", "-"],
        "k2_polyphase": ["kb64: 100 ms, full precision", "12.3x"],
        "k4_register_tile": ["kb64: 8 ms, full precision", "-"],
        "k5_mma": ["kb64: 2.5 ms, TF32", "3.2x"],
        "k6_wgmma": ["kb64: 2 ms, TF32", "1.2x"],
        "k5_dmma": ["kb64: 8 ms, float64", "2.5x"],
        "depthwise": ["depthwise: 0.5 ms, full precision", "4.0x"],
    }


def test_the_ladder_marks_times_of_frozen_weights():
    frozen = row(rung="k4_register_tile", ms_p50=8.0, weights="frozen")
    another = row("kb74", rung="k1_gather", time="2027-01-01T00:00:00Z")
    lines = ladder.render([frozen, row(rung="k3_shared_tile", ms_p50=16.0), another]).splitlines()
    marked = [line for line in lines if "| kb64: 8 ms*, full precision" in line]
    assert len(marked) == 1
    assert "| kb64: 16 ms, full precision" in "\n".join(lines)
    assert lines[-1].endswith(f"2026-01-02. {table.note([frozen])}")


# --- ten layers, precisions -------------------------------------------------------------------------------------------


def selection_row(name, ms, **values):
    """A row of the selection; torch takes 6 ms, conv1d 3."""
    made = dict(precision="tf32", ms_p50=ms, cudnn_ms_p50=6.0, conv1d_ms_p50=3.0)
    return replace(row(name, "auto"), **made | values)


def test_ten_layers_stand_in_readme_and_in_lines():
    step = dict(direction="step", conv1d_ms_p50=None)
    measured = [
        selection_row("kb64", 1.5),
        selection_row("kb64", 2.0, **step),
        selection_row("kb64", 1.0, dtype="bfloat16", precision="bfloat16", weights="frozen"),
        selection_row("mimi", 3.0),
        selection_row("kb79", 3.0),
        selection_row("kb64", 9.0, precision="ieee"),
        selection_row("kb64", 0.1, gpu="another"),
    ]
    rendered = summary.ten(measured)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in rendered.splitlines() if line[:1] == "|"]
    assert lines[0] == ["layer", "channels, taps, stride", *(f"{of}, {of_dtype}" for of in ("forward", "step")
                        for of_dtype in ("TF32", "bf16"))]  # fmt: skip
    assert lines[2:] == [
        ["kb64", "128 to 128, 3, 1", "1.5 (2.0x)", "1* (3.0x)", "2 (3.0x)", "-"],
        ["mimi", "512 to 512 in 512 groups, 4, 2", "3 (1.0x)", "-", "-", "-"],
    ]
    assert rendered.endswith(table.note(measured))
    of_kb64, of_mimi = summary.lines(measured)
    assert of_kb64.split()[0] == "kb64"
    assert of_kb64.endswith("TF32 1.5 ms (2.0x), bf16 1* ms (3.0x)")
    assert of_mimi.endswith("TF32 3 ms (1.0x), bf16 -")
    others = [replace(measured[0], workload=name) for name in ("kb64@batch16", "kb79")]
    assert summary.ten([]) == summary.ten(others) == table.EMPTY


@pytest.mark.parametrize("render", [claim.render, ladder.render, summary.ten, summary.precisions])
def test_pages_show_the_gpu_with_the_most_rows(render):
    of_bf16 = dict(dtype="bfloat16", precision="bfloat16")
    main = [
        *(selection_row("kb64", 1.5), selection_row("kb79", 3.0), selection_row("kb64", 1.0, **of_bf16)),
        *of_ladder(),
    ]
    newer = dict(gpu="another", ms_p50=0.1, time="2026-12-01T00:00:00Z")
    assert render([*main, replace(main[0], **newer), replace(main[-1], **newer)]) == render(main)


def test_the_layers_of_the_readme_are_ten_workloads():
    assert len(set(summary.LAYERS) & set(workloads.WORKLOADS)) == 10


def test_precisions_are_told_by_medians_and_means():
    errors = (1e-4, 2e-4, 9e-4)
    measured = [selection_row(name, ms, relerr=error, cudnn_relerr=3e-4) for name, ms, error in
                zip(("kb64", "kb74", "kb79"), (1.0, 2.0, 4.0), errors, strict=True)]  # fmt: skip
    measured.append(selection_row("kb64", 1.0, dtype="float64", precision="float64", cudnn_relerr=0.0, relerr=2e-16))
    measured.append(selection_row("kb64", 1.0, direction="grad_input", precision="ieee"))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in summary.precisions(measured).splitlines()]
    assert [[line[0], line[1], *line[3:]] for line in lines[2:]] == [
        ["float32", '`"tf32"`', "2e-04", "3e-04", "1.5x"],
        ["float64", '`"fp64"`', "2e-16", "reference", "3.0x"],
    ]
    assert summary.precisions([]) == table.EMPTY


def test_every_precision_is_told_with_its_name():
    named = {(str(dtype).removeprefix("torch."), name) for dtype, names in PRECISIONS.items() for name in names}
    assert named == {(dtype, summary.SHORT.get(precision, precision)) for dtype, precision in summary.PRODUCTS}


def test_figures_stand_under_their_titles_the_hero_first():
    rendered = readme.figures(plotting.plans([*of_ladder(), *sweep(16)]))
    names = re.findall(r"\]\((\w+)\.png\)", rendered)
    assert names[:2] == ["throughput_batch16_float32_ieee", "ladder_float32"]
    planned = plotting.plans(rows.read_all(ROOT / "plots" / "data"))
    everything = re.findall(r"\]\((\w+)\.png\)", readme.figures(planned))
    assert sorted(everything) == sorted(planned)
    assert everything[0] == "throughput_batch16_float32_tf32"
    shares = [name for name in everything if name.startswith("roofline")]
    assert shares[:2] == ["roofline_float32_tf32", "roofline_bfloat16"]
    assert "step" in shares[-1]
    assert rendered.startswith("**1.1 times as fast as torch from 1,024 samples on (kb64, float32 ieee, batch 16)**")


def test_the_files_of_the_ladder_are_there():
    for line in ladder.render([]).splitlines()[2:]:
        assert (ROOT / line.partition("](")[2].partition(")")[0]).is_file()


def test_every_recorded_rung_beside_the_ladder_has_its_line():
    """For the recorded rows, whose precisions a made-up row might not have."""
    recorded = rows.read_all(Path(__file__).parents[1] / "plots" / "data")
    assert set(ladder.BESIDE) <= set(cells(recorded))
