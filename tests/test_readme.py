"""README's tables: between their markers, and in step with the recorded rows."""

from pathlib import Path

import pytest

from numba_tconv import decoder_times, kernelbench_rows, readme, rows, table

from .samples import EMPTY_README, ladder, result, timed

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["table", "kernelbench", "decoders"])
def test_readme_shows_the_recorded_rows(name):
    section = readme.section((ROOT / "README.md").read_text(encoding="utf-8"), name)
    assert section == readme.tables(ROOT / "plots" / "data")[name], "run `make figures`"


def test_tables_are_of_the_rows_of_their_files(tmp_path):
    assert readme.tables(tmp_path) == dict.fromkeys(("table", "kernelbench", "decoders"), table.EMPTY)
    rows.append(tmp_path / "some.csv", ladder())
    rows.append(tmp_path / kernelbench_rows.FILE, [result()], kernelbench_rows.Result)
    rows.append(tmp_path / decoder_times.FILE, [timed()], decoder_times.Timed)
    assert readme.tables(tmp_path) == {
        "table": table.render(ladder()),
        "kernelbench": kernelbench_rows.render([result()]),
        "decoders": decoder_times.render([timed()]),
    }


def test_only_what_is_between_the_markers_changes(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{EMPTY_README}after\n")
    tables = {"decoders": "some\ntable", "table": "another", "kernelbench": "\\1"}
    for _ in range(2):
        readme.update(path, tables)
        text = path.read_text()
        assert text.startswith("before\n<!-- table:begin -->\nanother\n<!-- table:end -->\n")
        assert text.endswith("<!-- decoders:begin -->\nsome\ntable\n<!-- decoders:end -->\nafter\n")
        assert {name: readme.section(text, name) for name in tables} == tables


@pytest.mark.parametrize("missing", ["<!-- kernelbench:begin -->", "<!-- decoders:end -->"])
def test_a_readme_without_a_marker_is_left_alone(tmp_path, missing):
    path = tmp_path / "README.md"
    path.write_text(before := EMPTY_README.replace(missing, ""))
    with pytest.raises(rows.RowsError, match=rf"README.md: the markers .*{missing}.* missing"):
        readme.update(path, dict.fromkeys(("table", "kernelbench", "decoders"), "new"))
    assert path.read_text() == before
