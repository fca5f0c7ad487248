"""The command `figures` writes all files or none."""

import pytest

from numba_tconv.lab.cli import commands
from numba_tconv.lab.measure import rows, search
from numba_tconv.lab.report import ladder as of_rungs
from numba_tconv.lab.report import tables as table
from numba_tconv.lab.report.readme import section
from numba_tconv.lab.studies import decoder_modes, decoder_times
from tests.command_line import run
from tests.samples import EMPTY_README, EMPTY_RESULTS, in_mode, ladder, sweep


@pytest.fixture
def places(tmp_path):
    rows.append(tmp_path / "data" / "some.csv", ladder())
    rows.append(tmp_path / "data" / decoder_modes.FILE, [in_mode()], decoder_modes.Timed)
    return "--data", tmp_path / "data", "--plots", tmp_path / "plots"


@pytest.fixture
def pages(tmp_path):
    """README.md and the page of results, with nothing between their markers."""
    (tmp_path / "plots").mkdir()
    front, results = tmp_path / "README.md", tmp_path / "plots" / "README.md"
    front.write_text(EMPTY_README)
    results.write_text(EMPTY_RESULTS)
    return front, results


def test_figures_draws_and_fills_the_pages_and_then_changes_nothing(capsys, places, pages):
    front, results = pages
    code, out, _ = run(capsys, "figures", *places, "--readme", front)
    assert code == 0
    assert section(front.read_text(), "ladder") == of_rungs.render(ladder())
    assert section(results.read_text(), "tables") == table.render(ladder())
    files = [front, *results.parent.iterdir()]
    assert results.parent / "decoders.svg" in files
    for path in files:
        assert str(path) in out
    before = {path: path.stat().st_mtime_ns for path in files}
    code, out, _ = run(capsys, "figures", *places, "--readme", front)
    assert (code, out) == (0, "0 files changed\n")
    assert {path: path.stat().st_mtime_ns for path in files} == before


def files_in(folder):
    return {path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


# A file in the way, the arguments, and the message.
LACKING = {
    "no rows": ({}, ["--data", "plots"], "plots holds no rows: they are in a checkout of the repository"),
    "a file for a folder": ({}, ["--plots", "README.md/plots"], "cannot write README.md/plots"),
    "no folder can be made": ({}, ["--plots", "/proc/plots"], "cannot write /proc/plots"),
    "no README": ({}, ["--readme", "READ.md"], "there is no READ.md"),
    "no marker": ({"README.md": EMPTY_README.replace("ladder:end", "l")}, [], "README.md: the markers"),
    "no marker in the results": ({"plots/README.md": EMPTY_RESULTS.replace("tables:begin", "t")}, [], "the markers"),
    "rows are of another version": ({"data/old.csv": "time,speed\n"}, [], "the columns of another version"),
    "other rows are of another version": ({f"data/{decoder_times.FILE}": "x"}, [], "the columns of another version"),
    "a search is of another version": ({f"data/{search.FILE}": "x"}, [], "the columns of another version"),
}


@pytest.mark.parametrize("what", LACKING)
def test_figures_that_lack_something_write_nothing(capsys, tmp_path, monkeypatch, what):
    files, argv, said = LACKING[what]
    rows.append(tmp_path / "data" / "some.csv", [*ladder(), *sweep()])
    for path, text in ({"README.md": EMPTY_README, "plots/notes": ""} | files).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    before = files_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "figures", "--data", "data", "--plots", "plots", *argv)
    assert (code, out, err.count("\n")) == (commands.MISTAKE, "", 1)
    assert said in err
    assert files_in(tmp_path) == before


@pytest.mark.thorough
def test_figures_without_a_readme_are_drawn(capsys, places, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "figures", *places)
    assert code == 0
    assert "there is no README.md to put the tables in" in out
    assert [*(tmp_path / "plots").iterdir()]
