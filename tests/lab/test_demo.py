"""`demo` prints a few lines, leaves drawn figures alone, and reports what is wrong."""

import re
from pathlib import Path

import pytest
import torch

from numba_tconv.lab.cli import commands, demo
from numba_tconv.lab.measure import accuracy, bench, check, rows, workloads
from numba_tconv.lab.measure import contestants as named
from numba_tconv.runtime.device import H200
from numba_tconv.selection.registry import LADDER
from tests.command_line import no_gpu, run
from tests.samples import ladder, row, sweep
from tests.thorough import thorough

ROOT = Path(__file__).parents[2]


@pytest.fixture
def places(tmp_path):
    data = tmp_path / "data"
    rows.append(data / "some.csv", [*ladder(), *sweep(16)])
    return "--data", data, "--plots", tmp_path / "plots"


class Simulator:
    """A finished `check --small`: some results right, perhaps one wrong."""

    def __init__(self, returncode=0):
        self.returncode = returncode

    def communicate(self):
        return "| a | 1e-7 | 1e-7 | right |\n| b | - | - | cannot do it |\n| c | 1e-7 | 1e-7 | right |\n", None


@no_gpu
@pytest.mark.parametrize("rungs", thorough([3, len(LADDER)], always=[3]))
def test_demo_without_a_gpu(capsys, places, tmp_path, monkeypatch, rungs):
    monkeypatch.setattr(demo, "start_simulator", Simulator)
    monkeypatch.setattr(demo, "LADDER", LADDER[:rungs])
    rows.append(tmp_path / "data" / "more.csv", [row(rung="auto", precision="tf32")])
    figure = tmp_path / "plots" / demo.FIGURE
    figure.parent.mkdir()
    figure.write_text("drawn before")
    code, out, _ = run(capsys, "demo", *places)
    assert code == 0
    checked, compiled, title, *layers, last = out.splitlines()
    assert checked == "Checked in the CUDA simulator on 3 small problems: 2 results, all right"
    for name in LADDER[:rungs]:
        assert re.search(rf" {name.name.partition('_')[0]} \d+[,;]", compiled)
    assert compiled.endswith("; 0 bytes spilled")
    assert title.startswith("Recorded on NVIDIA H200, driver 580.1")
    assert [line.split()[0] for line in layers] == ["kb64"]
    assert last == f"Throughput against signal length: {figure}"
    assert "|" not in out
    assert "\r" not in out
    assert list(figure.parent.iterdir()) == [figure], "nothing is drawn"
    assert figure.read_text() == "drawn before"


def test_demo_of_the_recorded_rows_is_short():
    lines = demo.results(rows.read_all(ROOT / "plots" / "data"), ROOT)
    assert 11 <= len(lines) <= 12
    assert all(len(line) <= 140 for line in lines)
    assert (ROOT / "plots" / demo.FIGURE).exists()


def test_where_the_shown_rows_were_measured():
    shown, later = row(rung="auto", precision="tf32"), row(driver="999.9", time="2026-02-03T04:05:06Z")
    title, *_ = demo.results([shown, later], ROOT)
    assert ", driver 580.1, " in title


@no_gpu
def test_demo_fails_where_the_simulator_finds_something_wrong(capsys, places, monkeypatch):
    monkeypatch.setattr(demo, "start_simulator", lambda: Simulator(returncode=1))
    monkeypatch.setattr(demo, "compiled", lambda: "")
    code, out, _ = run(capsys, "demo", *places)
    assert code == 1
    assert "| a | 1e-7 | 1e-7 | right |" in out
    assert "all right" not in out


def test_demo_with_a_gpu_measures_and_draws_its_own_figure_alone(capsys, places, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(named, "current_device", lambda: H200)
    monkeypatch.setattr(demo, "checked_live", lambda: 0)
    monkeypatch.setattr(demo, "compiled", lambda: "compiled")

    def measure(workload, names, repeats, budget_s):
        assert (workload.name, repeats, budget_s) == ("kb64@batch16", demo.LIVE_REPEATS, demo.LIVE_BUDGET_S)
        return [row(workload, name, gpu="NVIDIA H100") for name in names if name != "auto"]

    monkeypatch.setattr(bench, "measure", measure)
    code, out, _ = run(capsys, "demo", *places)
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("kb64's channels")]
    assert all(f"{length}: " in line for length in demo.LIVE_LENGTHS)
    floor = row(workloads.at_length(workloads.get("kb64"), demo.LIVE_LENGTHS[-1], 16)).floor_ms
    assert f"(cuDNN {2.5 * floor:.3g})" in line
    path = tmp_path / "plots" / "live" / "throughput_batch16_float32_ieee.png"
    assert out.splitlines()[-1] == f"Throughput against signal length: {path}"
    assert {one.stem for one in path.parent.iterdir()} == {path.stem}
    assert list((tmp_path / "plots").iterdir()) == [path.parent]


@pytest.mark.parametrize("right", [True, False])
def test_the_demo_says_what_is_wrong(capsys, monkeypatch, right):
    outcomes = [check.Outcome("one", accuracy.Error(0, 0), right), check.Outcome("refused", None, True, "no")]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    asked = []
    monkeypatch.setattr(check, "parity", lambda *case: asked.append(case) or (("forward", one) for one in outcomes))
    assert demo.checked_live() == (0 if right else commands.FAILED)
    problems = [*check.SMALL, workloads.get("kb64").problem]
    assert asked == [(one, torch.float32, precision) for precision in ("ieee", "tf32") for one in problems]
    out, _ = capsys.readouterr()
    assert out.splitlines()[-1] == f"Checked on H200 on 4 problems: 8 results, {'all right' if right else '8 wrong'}"
    assert out.count("WRONG: one on ") == (0 if right else 8)


@no_gpu
def test_demo_without_rows_goes_on(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "start_simulator", Simulator)
    monkeypatch.setattr(demo, "compiled", lambda: "compiled")
    code, out, _ = run(capsys, "demo", "--data", tmp_path, "--plots", tmp_path)
    assert code == 0
    assert "holds no rows" in out
    assert out.splitlines()[-1].startswith(f"There is no {tmp_path / demo.FIGURE}: `make figures` draws it")


def test_what_a_call_selects_is_not_named_as_the_fastest_rung():
    layer = workloads.at_length(workloads.get(demo.LIVE_WORKLOAD), demo.LIVE_LENGTHS[0], demo.BATCH)
    said = demo.swept([row(layer, "k4_register_tile"), row(layer, bench.AUTO, slower=1.1)])
    assert f"{demo.LIVE_LENGTHS[0]}: " in said
    assert "by k4_register_tile (cuDNN" in said
