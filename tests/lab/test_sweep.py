"""The command that measures curves over length, with made-up measurements."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.lab.cli import commands
from numba_tconv.lab.measure import bench, rows, workloads
from numba_tconv.lab.report.figures import by_length
from tests.command_line import run
from tests.samples import ladder, row


def swept(path):
    return [(one.workload, one.length) for one in rows.read(path)]


def test_sweep_is_of_a_layer_after_the_other_at_a_fixed_batch(capsys, measuring, compiling, tmp_path):
    out = tmp_path / "rows.csv"
    limits = ("--min", "2**10", "--max", "2**11", "--rung", "k1_gather", "--out", out)
    assert run(capsys, "sweep", "kb64", "hifigan_u1", "--batch", "8", *limits)[0] == 0
    assert swept(out) == [
        *(("kb64@batch8", 1024), ("kb64@batch8", 2048)),
        *(("hifigan_u1@batch8", 128), ("hifigan_u1@batch8", 256)),  # of stride 8
    ]
    assert [(one.problem.batch, one.problem.length) for one in compiling] == [(8, 1024), (8, 2048), (8, 128), (8, 256)]
    assert {one.rung for one in compiling} == {"k1_gather"}


def test_sweep_takes_any_layer_by_its_sizes(capsys, measuring, compiling, tmp_path):
    out = tmp_path / "rows.csv"
    sizes = ("--in-channels", 24, "--out-channels", 12, "--kernel-size", 7, "--stride", 4, "--padding", 2, "--bias")
    limits = ("--min", 1, "--max", 64, "--factor", 8, "--rung", "auto", "--out", out)
    assert run(capsys, "sweep", *sizes, *limits)[0] == 0
    assert swept(out) == [("c24to12k7s4p2bias@batch16", length) for length in (1, 2, 16)]
    assert workloads.of_row(*swept(out)[-1]).problem == Problem(16, 24, 12, 7, 16, 4, 2, bias=True)


def test_sweep_of_single_lengths_and_neighbours(capsys, measuring, compiling, tmp_path):
    out = tmp_path / "rows.csv"
    lengths = ("--length", "65537", "--length", "2**16")
    assert run(capsys, "sweep", "kb64", *lengths, "--rung", "auto", "--out", out)[0] == 0
    assert swept(out) == [("kb64@batch16", 65536), ("kb64@batch16", 65537)]
    out = tmp_path / "others.csv"
    run(capsys, "sweep", "kb64", "--neighbours", "--max", "2**13", "--rung", "auto", "--out", out)
    assert [length for _, length in swept(out)] == [2047, 2049, 4095, 4097, 8191, 8193]


def test_a_rung_sits_out_lengths_that_cost_more_than_the_budget(capsys, measuring, compiling, tmp_path, monkeypatch):
    def measure(workload, rungs, *_, **__):
        rates = {"k1_gather": 0.5, "k2_polyphase": 4.0, "auto": 40.0}
        return [replace(row(workload, rung), tflops=rates[rung]) for rung in rungs]

    monkeypatch.setattr(bench, "measure", measure)
    out, rungs = tmp_path / "rows.csv", ("--rung", "k1_gather", "--rung", "k2_polyphase", "--rung", "auto")
    code, printed, _ = run(capsys, "sweep", "kb64", *rungs, "--budget", 0.5, "--out", out)
    assert code == 0
    counts = {name: [one.length for one in rows.read(out) if one.rung == name] for name in rungs[1::2]}
    longest = {"k1_gather": 2**14, "k2_polyphase": 2**17, "auto": 2**20}  # 7 calls of 25.8 GFLOP for 2**14 positions
    assert {name: some[-1] for name, some in counts.items()} == longest
    assert "left out" not in printed
    printed = run(capsys, "sweep", "kb64", "--rung", "k1_gather", "--budget", 0.5, "--out", out)[1]
    assert "left out: kb64@batch16 from L 32768 on: it takes longer than the budget" in printed


def test_where_torch_refuses_the_length_the_curve_ends(capsys, measuring, compiling, tmp_path, monkeypatch):
    def measure(workload, rungs, *_, **__):
        if workload.problem.length > 1024:
            raise RuntimeError(f"Expected {said} to be true")
        return [row(workload, rung) for rung in rungs]

    monkeypatch.setattr(bench, "measure", measure)
    out, said = tmp_path / "rows.csv", "canUse32BitIndexMath(input)"
    code, printed, _ = run(capsys, "sweep", "kb64", "--rung", "auto", "--out", out)
    assert (code, swept(out)) == (0, [("kb64@batch16", 1024)])
    assert "left out: kb64@batch16 from L 2048 on" in printed
    said = "another"
    with pytest.raises(RuntimeError, match="another"):
        run(capsys, "sweep", "kb64", "--rung", "auto", "--out", out)


@pytest.mark.parametrize("needed", [0, 1, 2])
def test_where_memory_is_short_the_selection_stays_and_then_the_curve_ends(
    capsys, measuring, compiling, tmp_path, monkeypatch, needed
):
    def measure(workload, rungs, *_, **__):
        if workload.problem.length > 1024 and len(rungs) > needed:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        return [row(workload, rung) for rung in rungs]

    monkeypatch.setattr(bench, "measure", measure)
    out = tmp_path / "rows.csv"
    rungs = ("--rung", "k4_register_tile", "--rung", "auto", "--max", "4096")
    code, printed, _ = run(capsys, "sweep", "kb64", "kb74", *rungs, "--out", out)
    assert code == 0
    said = [(one.length, one.rung) for one in rows.read(out) if one.workload == "kb64@batch16"]
    both = [(length, rung) for length in (1024, 2048, 4096) for rung in rungs[1:4:2]]
    assert said == {0: both[:2], 1: [*both[:2], (2048, "auto"), (4096, "auto")], 2: both}[needed]
    assert printed.count("on: too long for memory or torch") == (0 if needed else 2)
    assert ("kb74@batch16", 1024) in swept(out)


def test_a_roofline_far_above_hides_no_curve():
    layer = workloads.get("kb64")
    some = [replace(one, roofline=one.roofline / 5000) for one in ladder(workloads.at_length(layer, 2**10, 1))]
    axes = by_length.throughput(some).axes[0]
    low, high = axes.get_ylim()
    assert all(low <= one.opponent_ms / one.ms_p50 <= high for one in some)
    assert low <= 1 <= high


def test_times_of_a_busy_machine_are_said_to_be_disturbed():
    calm = row("kb64", ms_p20=1.0, ms_p50=1.1, ms_p80=1.2)
    assert "disturbed" not in commands.describe(calm)
    assert commands.describe(replace(calm, ms_p80=3.5)).endswith("; disturbed: calls took 1 to 3.5 ms, measure again")
