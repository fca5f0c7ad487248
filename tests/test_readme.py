"""README's tables: between their markers, and in step with the recorded rows."""

from dataclasses import replace
from pathlib import Path

import pytest

from numba_tconv import claim, decoder_times, kernelbench_rows, ladder, readme, rows, table, workloads
from numba_tconv.kernels import RUNGS

from .samples import EMPTY_README, result, row, timed
from .samples import ladder as of_ladder

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", readme.NAMES)
def test_readme_shows_the_recorded_rows(name):
    section = readme.section((ROOT / "README.md").read_text(encoding="utf-8"), name)
    assert section == readme.tables(ROOT / "plots" / "data")[name], "run `make figures`"


def test_tables_are_of_the_rows_of_their_files(tmp_path):
    assert readme.tables(tmp_path) == dict.fromkeys(readme.NAMES, table.EMPTY) | {"ladder": ladder.render([])}
    measured = [*of_ladder(), row(rung="auto", precision="tf32")]
    rows.append(tmp_path / "some.csv", measured)
    rows.append(tmp_path / kernelbench_rows.FILE, [result()], kernelbench_rows.Result)
    rows.append(tmp_path / decoder_times.FILE, [timed()], decoder_times.Timed)
    assert readme.tables(tmp_path) == {
        "claim": claim.render(measured),
        "ladder": ladder.render(measured),
        "table": table.render(measured),
        "kernelbench": kernelbench_rows.render([result()]),
        "decoders": decoder_times.render([timed()]),
    }


def test_only_what_is_between_the_markers_changes(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{EMPTY_README}after\n")
    tables = {"decoders": "some\ntable", "table": "another", "kernelbench": "\\1", "claim": "a word"}
    for _ in range(2):
        readme.update(path, tables)
        text = path.read_text()
        assert text.startswith("before\n<!-- claim:begin -->\na word\n<!-- claim:end -->\n")
        assert "<!-- table:begin -->\nanother\n<!-- table:end -->\n" in text
        assert text.endswith("<!-- decoders:begin -->\nsome\ntable\n<!-- decoders:end -->\nafter\n")
        assert {name: readme.section(text, name) for name in tables} == tables


@pytest.mark.parametrize("missing", ["<!-- kernelbench:begin -->", "<!-- decoders:end -->"])
def test_a_readme_without_a_marker_is_left_alone(tmp_path, missing):
    path = tmp_path / "README.md"
    path.write_text(before := EMPTY_README.replace(missing, ""))
    with pytest.raises(rows.RowsError, match=rf"README.md: the markers .*{missing}.* missing"):
        readme.update(path, dict.fromkeys(readme.NAMES, "new"))
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
    assert "commit 0123abc)" in said
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


def test_nothing_is_claimed_without_rows():
    assert claimed() == claimed(*of_ladder()) == table.EMPTY


def cells(rows):
    """What is told of each rung that was measured: where and how long, and the gain."""
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
        replace(row(rung=rung, dtype="float64", ms_p50=ms, roofline=None), precision="float64")
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


def test_the_files_of_the_ladder_are_there():
    for line in ladder.render([]).splitlines()[2:]:
        assert (ROOT / line.partition("](")[2].partition(")")[0]).is_file()


def test_every_recorded_rung_beside_the_ladder_has_its_line():
    """By the rows that are there, whose names of precisions a made-up row might not have."""
    recorded = rows.read_all(Path(__file__).parents[1] / "plots" / "data")
    assert set(ladder.BESIDE) <= set(cells(recorded))
