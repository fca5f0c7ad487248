"""Alias-free activations timed: rows, checks, table, command."""

import pytest
import torch

from numba_tconv.lab.cli import commands
from numba_tconv.lab.cli import parser as cli
from numba_tconv.lab.measure import ahead, bench, rows
from numba_tconv.lab.measure.accuracy import Error
from numba_tconv.lab.measure.machine import Machine
from numba_tconv.lab.studies import activations
from numba_tconv.torch_api.alias_free import AliasFreeActivation
from tests.command_line import run
from tests.samples import activated


class At:
    """Stands for a recorded CUDA event."""

    def __init__(self, ms):
        self.ms = ms

    def elapsed_time(self, stop):
        return stop.ms - self.ms


@pytest.fixture
def on_the_cpu(monkeypatch):
    """``measure`` as if on an H200, where ours takes 2 ms and torch's 5."""

    def interleave(both, *_):
        for one, ms in zip(both, (2.0, 5.0), strict=True):
            one.events = [(At(1.0), At(1.0 + ms * share)) for share in (0.5, 1.0, 9.0)]

    monkeypatch.setattr(activations, "DEVICE", "cpu")
    monkeypatch.setattr(activations, "interleave", interleave)
    monkeypatch.setattr(activations.machine, "describe", lambda: Machine("0123abc", "H200", "580", "2.11", "9", "0"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", activations.DIRECTIONS)
def test_a_row(on_the_cpu, dtype, direction):
    row = activations.measure(6, 40, dtype, direction, batch=2)
    assert (row.batch, row.channels, row.length, row.direction) == (2, 6, 40, direction)
    assert (row.gpu, row.dtype) == ("H200", str(dtype).removeprefix("torch."))
    assert (row.ms_p50, row.torch_ms_p50) == (2.0, 5.0)
    assert 0 < row.torch_relerr < 2 * torch.finfo(dtype).eps
    assert 0 < row.relerr < 2 * torch.finfo(dtype).eps


def test_an_output_has_one_error_and_so_has_each_gradient():
    x, alpha = torch.tensor([[3.0, 4.0], [0.0, 0.0]]).double(), torch.tensor([3.0, 4.0]).double()
    one = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    assert activations.errors(x + one, x) == [Error(1 / 5, 1 / 4)]
    assert activations.errors((x + one, alpha + one[1]), (x, alpha)) == [Error(1 / 5, 1 / 4), Error(1 / 5, 1 / 5)]


@pytest.mark.parametrize("wrong", range(3))
@pytest.mark.parametrize("direction", activations.DIRECTIONS)
def test_no_row_comes_of_a_wrong_result(on_the_cpu, monkeypatch, direction, wrong):
    """A wrong output, or in a step one wrong gradient."""
    right = activations.side

    def side(module, *others):
        made = right(module, *others)
        call = made.call

        def spoiled():
            found = call()
            if not isinstance(module, AliasFreeActivation):
                return found
            if direction == "forward":
                return found * 1.01
            return [one * (1.01 if z == wrong else 1) for z, one in enumerate(found)]

        made.call = spoiled
        return made

    monkeypatch.setattr(activations, "side", side)
    with pytest.raises(bench.WrongResult, match=f"wrong on 6 x 40 torch.float32 {direction}"):
        activations.measure(6, 40, torch.float32, direction, batch=2)


def test_shapes_are_of_the_first_a_middle_and_the_last_stage():
    assert activations.shapes() == [(768, 1500), (96, 24_000), (24, 96_000)]


def test_kernels_are_compiled_at_once(monkeypatch, tmp_path):
    filled, file = [], tmp_path / "file"
    file.touch()
    monkeypatch.setattr(ahead.compile_ahead, "fill", lambda calls, cc, jobs: filled.extend(calls))
    for folder in ("", str(file)):
        monkeypatch.setenv("NUMBA_TCONV_CACHE", folder)
        ahead.compile_all(activations.calls(["bfloat16"]))
        assert not filled
    monkeypatch.setenv("NUMBA_TCONV_CACHE", str(tmp_path))
    ahead.compile_all(activations.calls(["bfloat16"]))
    assert [(call.sizes.channels, call.sizes.length) for call in filled] == activations.shapes()
    assert {(call.dtype, call.step) for call in filled} == {(torch.bfloat16, True)}


def test_the_table_has_the_newest_rows_in_order():
    older = activated(ms_p50=9.0, time="2020-01-01T00:00:00Z")
    others = [activated(dtype="bfloat16"), activated(channels=768, length=1500)]
    page = activations.render([activated("step"), activated(), older, *others])
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    shown = ["0.5", "0.1", "5.0x", "1.0e-07", "2.0e-07"]
    assert cells[2:] == [
        ["768, 1500", "float32", "forward", *shown],
        ["24, 96000", "float32", "forward", *shown],
        ["24, 96000", "float32", "step", *shown],
        ["24, 96000", "bfloat16", "forward", *shown],
    ]
    assert "4 inputs, NVIDIA H200" in page
    assert activations.render([]) == ""


def test_the_command_adds_rows(capsys, monkeypatch, tmp_path):
    """After a wrong result it measures the others."""
    seen, out = [], tmp_path / "rows.csv"

    def measure(*case):
        seen.append(case)
        if len(seen) == 2:
            raise bench.WrongResult("wrong on this", [])
        return activated()

    monkeypatch.setattr(commands, "require_gpu", lambda: None)
    monkeypatch.setattr(ahead, "compile_all", lambda calls: seen.append({call.dtype for call in calls}))
    monkeypatch.setattr(activations, "measure", measure)
    code, printed, err = run(capsys, "activations", "--dtype", "bfloat16", "--out", out)
    assert (code, err) == (commands.FAILED, "numba_tconv: wrong on this\n")
    ways = "forward", "step"
    assert seen == [{torch.bfloat16}, *((*one, torch.bfloat16, way) for one in activations.shapes() for way in ways)]
    assert "4 x 24 x 96000 float32 forward: 0.1 ms (torch 0.5)" in printed
    assert rows.read(out, activations.Timed) == [activated()] * 5
    assert cli.parser().parse_args(["activations"]).out == cli.DATA / activations.FILE
