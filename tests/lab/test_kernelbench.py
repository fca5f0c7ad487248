"""The KernelBench entries: the benchmark's constructors, weights and sizes, and on a GPU its rules."""

import inspect
from dataclasses import replace

import pytest
import torch

from numba_tconv.lab.cli import commands
from numba_tconv.lab.measure import rows
from numba_tconv.lab.measure.accuracy import Error
from numba_tconv.lab.studies import kernelbench
from numba_tconv.lab.studies.kernelbench import CORRECTNESS_TRIALS, ENTRIES
from tests.command_line import run
from tests.samples import WHERE, result

CONSTRUCTORS = {
    64: "in_channels out_channels kernel_size stride=1 padding=0 output_padding=0 groups=1 bias=False",
    74: "in_channels out_channels kernel_size stride=1 padding=0 dilation=1 bias=False",
    79: "in_channels out_channels kernel_size stride=1 padding=0 dilation=1 bias=False",
}


@pytest.mark.parametrize("number", ENTRIES)
def test_constructors_are_the_benchmarks(number):
    parameters = inspect.signature(ENTRIES[number].model).parameters.values()
    spelled = (p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters)
    assert " ".join(spelled) == CONSTRUCTORS[number]


@pytest.mark.parametrize("number", ENTRIES)
def test_the_same_seed_gives_the_same_layer(number):
    torch.manual_seed(7)
    theirs = kernelbench.torch_model(number)
    torch.manual_seed(7)
    ours = ENTRIES[number].model(*ENTRIES[number].arguments)
    assert list(ours.state_dict()) == ["conv1d_transpose.weight"]
    assert torch.equal(ours.conv1d_transpose.weight, theirs.weight)
    x = torch.rand(2, theirs.in_channels, 50)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("number", ENTRIES)
def test_all_arguments_reach_the_layer(number):
    others = dict(stride=3, padding=2, bias=True) | (
        dict(output_padding=1, groups=2) if number == 64 else dict(dilation=4)
    )
    layer = ENTRIES[number].model(4, 6, 5, **others).conv1d_transpose
    for name, value in others.items():
        assert (layer.bias is not None if name == "bias" else getattr(layer, name)) in (value, (value,)), name


def test_every_trial_has_an_input_of_its_own(monkeypatch):
    workload, rand, seen = kernelbench.get(ENTRIES[64].workload), torch.rand, []
    few = replace(workload, problem=replace(workload.problem, batch=1, length=9))
    monkeypatch.setattr(kernelbench, "get", lambda name: few)
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda model: model)
    monkeypatch.setattr(torch, "rand", lambda shape, device: seen.append(rand(shape)) or seen[-1])
    monkeypatch.setattr(kernelbench, "mean_ms", lambda model, x: 1.0)
    monkeypatch.setattr(kernelbench.machine, "measured", lambda: WHERE)
    found = kernelbench.run(64)
    assert found.passed == found.trials == len(seen) == CORRECTNESS_TRIALS
    assert len({x.sum().item() for x in seen}) == CORRECTNESS_TRIALS


def judged(passed, error, torch_error, number=64, **others):
    both = dict(relerr=error, largest_error=error, torch_relerr=torch_error, torch_largest_error=torch_error)
    return result(number, passed=passed, **both | others)


def test_a_failed_comparison_is_laid_to_the_side_that_is_less_exact():
    assert judged(CORRECTNESS_TRIALS, 1e-7, 3e-4).accepted
    failed = judged(0, 1e-7, 3e-4)
    assert not failed.accepted
    assert failed.torch_is_the_inexact_side
    assert not judged(0, 3e-4, 3e-4).torch_is_the_inexact_side
    assert not judged(0, 3e-4, 1e-7).torch_is_the_inexact_side
    assert not judged(0, float("nan"), 1e-7).torch_is_the_inexact_side


def test_nan_in_any_trial_is_the_largest_error():
    nan = float("nan")
    found = [{"ours": Error(1.0, 2.0)}, {"ours": Error(nan, nan)}, {"ours": Error(3.0, 1.0)}]
    assert str(kernelbench.largest(found, "ours")) == str(Error(nan, nan))
    assert kernelbench.largest(found[::2], "ours") == Error(3.0, 2.0)


def test_right_is_at_most_twice_torchs_error():
    assert judged(0, 5.9e-4, 3e-4).right
    assert not judged(0, 6.1e-4, 3e-4).right
    assert not judged(CORRECTNESS_TRIALS, float("nan"), 3e-4).right
    assert not judged(0, 1e-7, 3e-4, largest_error=6.1e-4).right


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def judging(monkeypatch):
    """As if on a GPU that computes problem 74 wrongly; returns the problems judged."""
    seen = []

    def judge(number):
        seen.append(number)
        return judged(3, 7e-4 if number == 74 else 1e-7, 3e-4, number, largest_error=2e-7)

    monkeypatch.setattr(commands, "require_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(kernelbench, "run", judge)
    return seen


def test_a_row_is_added_for_each_problem_that_is_right(capsys, judging, tmp_path):
    out = tmp_path / "new" / "rows.csv"
    code, printed, _ = run(capsys, "kernelbench", "--out", out)
    assert code == commands.FAILED
    assert "Problem 74: our output is too far from float64" in printed
    assert "Problem 64 fails the comparison because of torch's output" in printed
    assert "| 74      |        3 of 5 |" in printed
    assert run(capsys, "kernelbench", "79", "--out", out)[0] == 0
    assert rows.read(out, kernelbench.Result) == [kernelbench.run(number) for number in (64, 79, 79)]


def test_an_accepted_problem_is_not_said_to_fail(capsys, judging, monkeypatch, tmp_path):
    monkeypatch.setattr(kernelbench, "run", lambda number: judged(CORRECTNESS_TRIALS, 1e-7, 3e-4, number))
    code, printed, _ = run(capsys, "kernelbench", "--out", tmp_path / "rows.csv")
    assert code == 0
    assert "fails" not in printed


def test_the_table_has_the_newest_row_of_each_problem():
    old = result(64, time="2025-01-01T00:00:00Z", ms_mean=99.0)
    rendered = kernelbench.render([result(79, passed=0), result(64), old])
    title, _, *lines = rendered.splitlines()
    assert title.startswith("**KernelBench level 1**, milliseconds (mean of 100 calls), NVIDIA H200, driver 580.1")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    shown = ["2.0e-04", "3.0e-04", "1.5", "4.5", "3.00x"]
    assert cells == [["64", "5 of 5", *shown], ["79", "0 of 5", *shown]]


@pytest.mark.gpu
@pytest.mark.parametrize("number", ENTRIES)
def test_entries_at_full_size(number):
    result = kernelbench.run(number)
    assert result.accepted or result.torch_is_the_inexact_side
    assert result.relerr <= max(2 * result.torch_relerr, 1e-7)
