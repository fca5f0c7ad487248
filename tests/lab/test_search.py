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
from numba_tconv.lab.measure.search import Tried
from numba_tconv.runtime.device import H200

RECORDED = Path(__file__).parents[2] / cli.SEARCH
MEAN, WORST = 1.05, 1.15  # times the best configuration's time


def recorded():
    found = defaultdict(dict)
    for row in rows.existing(RECORDED, Tried):
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
    for row in rows.existing(RECORDED, Tried):
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
    path, tried = tmp_path / "search" / "k6.csv", rows.existing(RECORDED, Tried)[:5]
    search.append(path, tried)
    search.append(path, [replace(tried[0], ms_p50=1.5)])
    kept = rows.existing(path, Tried)
    assert kept[-1].ms_p50 == 1.5
    assert all(row.workload != tried[0].workload for row in kept[:-1]), "a new search takes the old one's place"
    other = replace(tried[0], precision="tf32" if tried[0].precision != "tf32" else "bf16")
    search.append(path, [other])
    assert rows.existing(path, Tried) == [*kept, other], "one in another precision stands beside it"


def test_a_damaged_row_is_refused(tmp_path):
    damaged = tmp_path / "k6.csv"
    header, first = RECORDED.read_text().splitlines()[:2]
    damaged.write_text(f"{header}\n{first.replace('True', 'yes').replace('False', 'no')}\n")
    with pytest.raises(rows.RowsError, match="not a row"):
        search.append(damaged, [])


def test_a_wrong_configuration_is_said_and_fails_and_the_next_is_searched(tmp_path, monkeypatch, capsys):
    best, taken = (replace(rows.existing(RECORDED, Tried)[0], chosen=n == 2, ms_p50=n) for n in (1.0, 2.0))

    def measure(workload, *arguments):
        if workload.name == "kb64":
            raise bench.WrongResult("wrong on kb64", [])
        return [best, taken]

    monkeypatch.setattr(commands, "require_gpu", lambda: None)
    monkeypatch.setattr(commands, "current_device", lambda: H200)
    monkeypatch.setattr(search, "compile_all", lambda found, jobs: None)
    monkeypatch.setattr(search, "measure", measure)
    assert cli.main(["search", "kb64", "dac_u2", "--out", str(tmp_path / "k6.csv")]) == commands.FAILED
    out, err = capsys.readouterr()
    assert "wrong on kb64" in err
    assert "dac_u2 tf32: 2 configurations, the best 1 ms, taken 2 ms" in out
    assert rows.existing(tmp_path / "k6.csv", Tried) == [best, taken]
    assert cli.main(["search", "dac_u2", "--out", str(tmp_path / "k6.csv")]) == 0
