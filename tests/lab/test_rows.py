"""Rows files: columns, reading back what was written, and never a damaged file."""

import os
from dataclasses import replace

import pytest

from numba_tconv.lab.measure import rows
from tests.samples import row

COLUMNS = (
    "time, commit, gpu, driver, torch, cudnn, numba_cuda, workload, direction, rung, dtype, precision, "
    "weights, length, ms_p20, ms_p50, ms_p80, cudnn_ms_p50, conv1d_ms_p50, gbps, tflops, roofline, relerr, cudnn_relerr"
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data" / "rows.csv"


def test_the_columns_and_their_order():
    assert ", ".join(rows.COLUMNS) == COLUMNS


def test_what_is_written_is_read(path):
    exact = dict(ms_p20=0.5, ms_p50=1.25, ms_p80=2.0, cudnn_ms_p50=3.0, gbps=100.0, tflops=7.0, relerr=1.5e-7)
    written = row(**exact, cudnn_relerr=1e-7, roofline=None, conv1d_ms_p50=None, gpu='a "quoted", GPU')
    rows.append(path, [written])
    assert rows.read(path) == [written]
    assert path.read_bytes().split(b"\n")[0].decode() == COLUMNS.replace(" ", "")
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o600)
    rows.append(path, [written])
    assert path.stat().st_mode & 0o777 == 0o600


def test_numbers_keep_six_digits(path):
    rows.append(path, [row(ms_p50=1.23456789)])
    assert rows.read(path)[0].ms_p50 == 1.23457


def test_rows_are_added_behind_those_there(path):
    rows.append(path, [row("kb64"), row("kb74")])
    before = path.read_text()
    rows.append(path, [row("kb79")])
    assert [one.workload for one in rows.read(path)] == ["kb64", "kb74", "kb79"]
    assert path.read_text().startswith(before)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (COLUMNS.replace(" ", "").replace(",relerr", ",error") + "\n", r"another version \(different: error, relerr\)"),
        (",".join(sorted(rows.COLUMNS)) + "\n", "their order"),
        ("", "another version"),
        ("\udcff", "cannot read"),
        (COLUMNS.replace(" ", "") + "\n1,2,3\n", "line 2: not a row"),
        (COLUMNS.replace(" ", "") + '\n"' + "1,2,3\n" * 30_000, "not a row .*field limit"),
        ('"' + "1,2,3\n" * 30_000, "not a row .*field limit"),
    ],
    ids=["a column renamed", "columns in another order", "empty", "not text", "a short line", "a quote", "at once"],
)
def test_a_file_that_is_not_ours_is_refused_and_left_alone(path, content, said):
    path.parent.mkdir()
    path.write_bytes(before := content.encode("utf-8", "surrogateescape"))
    for use in (lambda: rows.append(path, [row()]), lambda: rows.check_writable(path), lambda: rows.read(path)):
        with pytest.raises(rows.RowsError, match=said):
            use()
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    "wrong", [{"dtype": "float8"}, {"dtype": "nn"}, {"precision": "bf16"}, {"precision": "float32"}]
)
def test_a_row_of_an_unknown_precision_is_refused(path, wrong):
    rows.append(path, [row()])
    ((field, value),) = wrong.items()
    text = path.read_text()
    path.write_text(text.replace(f",{getattr(row(), field)},", f",{value},", 1))
    with pytest.raises(rows.RowsError, match=f"line 2: not a row .*{value}"):
        rows.read(path)


def test_a_row_without_torchs_time_is_refused(path):
    rows.append(path, [replace(row(), cudnn_ms_p50=None)])
    with pytest.raises(rows.RowsError, match="line 2: not a row"):
        rows.read(path)


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(path, monkeypatch):
    rows.append(path, [row()])
    before = path.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(rows.RowsError, match="No space left"):
        rows.append(path, [row()])
    assert path.read_text() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_directory_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(rows.RowsError, match=r"cannot write .*rows.csv"):
        rows.check_writable(tmp_path / "file" / "rows.csv")


def test_looking_ahead_writes_nothing(path):
    before = os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else []
    rows.check_writable(path)
    assert os.listdir(path.parent) == []
    assert not before or len(os.listdir("/proc/self/fd")) == len(before), "no file stays open"


def test_all_files_of_a_directory_are_read(tmp_path):
    rows.append(tmp_path / "b.csv", [row("kb74")])
    rows.append(tmp_path / "a.csv", [row("kb64")])
    assert [one.workload for one in rows.read_all(tmp_path)] == ["kb64", "kb74"]
    assert rows.read_all(tmp_path / "missing") == []


def test_the_newest_row_of_each_measurement_counts():
    old, new = row(time="2026-01-01T00:00:00Z"), row(time="2026-02-01T00:00:00Z")
    other = replace(old, rung="k1_gather")
    assert list(rows.latest([new, old, other]).values()) == [new, other]


def test_a_row_of_the_default_call_counts_before_newer_ones_of_frozen_weights():
    old, new = (row(time=f"2026-0{month}-01T00:00:00Z") for month in (1, 2))
    frozen = replace(new, weights="frozen", time="2026-03-01T00:00:00Z")
    assert list(rows.latest([old, frozen]).values()) == [old]
    assert list(rows.latest([frozen, old, new]).values()) == [new]
    assert list(rows.latest([replace(frozen, time=old.time), frozen]).values()) == [frozen]


def test_the_main_gpu_has_the_most_rows():
    one, another, newer = row(), row(gpu="another"), row(gpu="newer", time="2026-12-01T00:00:00Z")
    assert rows.of_main_gpu([]) == []
    assert rows.of_main_gpu([one, newer, one]) == [one, one]
    assert rows.of_main_gpu([newer, another]) == [newer]
    older = replace(newer, time="2025-01-01T00:00:00Z")
    assert rows.of_main_gpu([older, newer, one, one]) == [older, newer]


def test_a_file_that_is_as_it_should_be_is_not_written_again(path):
    assert rows.replace_text(path, "one")
    before = path.stat()
    assert not rows.replace_text(path, "one")
    assert path.stat() == before
    assert rows.replace_text(path, "two")
    assert path.read_text() == "two"


def test_the_opponent_is_the_faster_one():
    assert row(cudnn_ms_p50=3.0, conv1d_ms_p50=2.0).opponent_ms == 2.0
    assert row(cudnn_ms_p50=3.0, conv1d_ms_p50=None).opponent_ms == 3.0
