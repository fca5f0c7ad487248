"""k6's choice of a configuration against the recorded search over all, and the search's own file."""

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from numba_tconv.kernels.k6_wgmma.choose import choose_whole, cost
from numba_tconv.kernels.k6_wgmma.tile import configs
from numba_tconv.lab.cli import commands
from numba_tconv.lab.cli import parser as cli
from numba_tconv.lab.measure import bench, rows, search, workloads
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.device import H200

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores to choose for")

RECORDED = Path(__file__).parents[2] / cli.SEARCH
MEAN, WORST = 1.05, 1.15  # times the best configuration's time


def recorded():
    found = defaultdict(dict)
    for row in search.read(RECORDED):
        key = tuple(getattr(row, name) for name in search.described(KB64[0]))
        found[row.workload, row.precision][key] = row
    return found


KB64 = configs(workloads.get("kb64").problem, "tf32")


def test_the_choice_is_near_the_best_found():
    losses = {}
    for (name, precision), tried in recorded().items():
        problem = workloads.get(name).problem
        taken = tuple(search.described(choose_whole(problem, precision)).values())
        losses[name, precision] = tried[taken].ms_p50 / min(row.ms_p50 for row in tried.values())
    assert max(losses.values()) <= WORST, max(losses, key=losses.get)
    assert math.exp(sum(map(math.log, losses.values())) / len(losses)) <= MEAN


def test_the_model_tells_the_time_of_split_operands():
    for row in search.read(RECORDED):
        if row.precision == "tf32x3" and row.chosen and row.ms_p50 > 0.08:  # shorter ones are mostly launch
            problem = workloads.get(row.workload).problem
            assert 0.8 < row.ms_p50 / cost(problem, choose_whole(problem, row.precision), H200) < 1.25, row


def test_the_search_was_over_everything():
    for (name, precision), tried in recorded().items():
        problem = workloads.get(name).problem
        assert set(tried) == {tuple(search.described(c).values()) for c in configs(problem, precision)}, name
        assert [row.chosen for row in tried.values()].count(True) == 1
    precisions = defaultdict(set)
    for name, precision in recorded():
        precisions[name].add(precision)
    # Workloads for large tiles.
    for workload in workloads.WORKLOADS.values():
        found = configs(workload.problem, "tf32")
        if workload.problem.groups == 1 and found and found[0].tile.whole and found[0].tile.rows >= 64:
            assert precisions[workload.name] >= {"tf32", "bf16"} or workload.name == "small"


def test_what_costs_more():
    problem = workloads.get("dac_u2").problem
    config = choose_whole(problem, "tf32")
    assert cost(replace(problem, length=2 * problem.length), config, H200) > 1.9 * cost(problem, config, H200)
    assert cost(problem, config, replace(H200, multiprocessors=66)) > 1.9 * cost(problem, config, H200)
    assert cost(problem, replace(config, stages=4), H200) > cost(problem, config, H200)


def test_few_tiles_are_lower():
    """With a few samples the highest tile would leave most multiprocessors without work."""
    problem = workloads.get("head").problem
    assert choose_whole(problem, "bf16").tile.rows < choose_whole(replace(problem, batch=64), "bf16").tile.rows


def test_rows_survive_the_file(tmp_path):
    path, tried = tmp_path / "search" / "k6.csv", search.read(RECORDED)[:5]
    search.append(path, tried)
    search.append(path, [replace(tried[0], ms_p50=1.5)])
    kept = search.read(path)
    assert kept[-1].ms_p50 == 1.5
    assert all(row.workload != tried[0].workload for row in kept[:-1]), "a new search takes the old one's place"
    other = replace(tried[0], precision="tf32" if tried[0].precision != "tf32" else "bf16")
    search.append(path, [other])
    assert search.read(path) == [*kept, other], "one in another precision stands beside it"


def test_a_file_of_another_version_is_left_alone(tmp_path):
    path = tmp_path / "k6.csv"
    path.write_text("time,commit\n1,2\n")
    with pytest.raises(rows.RowsError, match="another version"):
        search.append(path, search.read(RECORDED)[:1])
    assert path.read_text() == "time,commit\n1,2\n"


def test_an_unknown_workload_is_one_line(capsys):
    assert cli.main(["search", "kb63"]) == 2
    assert "no workload is called 'kb63'" in capsys.readouterr().err


def test_what_cannot_be_added_to_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(rows.RowsError, match="cannot write"):
        search.check_writable(tmp_path / "file" / "k6.csv")
    damaged = tmp_path / "k6.csv"
    header, first = RECORDED.read_text().splitlines()[:2]
    for line in ("1,2,3", first.replace("True", "yes").replace("False", "no")):
        damaged.write_text(f"{header}\n{line}\n")
        with pytest.raises(rows.RowsError, match="not a row"):
            search.check_writable(damaged)
    search.check_writable(tmp_path / "new.csv")
    assert not (tmp_path / "new.csv").exists()


def test_a_wrong_configuration_is_said_and_fails(tmp_path, monkeypatch, capsys):
    def wrong(*arguments):
        raise bench.WrongResult("wrong on kb64", [])

    monkeypatch.setattr(commands, "require_gpu", lambda: None)
    monkeypatch.setattr(commands, "current_device", lambda: H200)
    monkeypatch.setattr(search, "compile_all", lambda found, jobs: None)
    monkeypatch.setattr(search, "measure", wrong)
    assert cli.main(["search", "kb64", "--out", str(tmp_path / "k6.csv")]) == commands.FAILED
    assert "wrong on kb64" in capsys.readouterr().err
