"""The command line, also without a GPU. `figures`: test_cli_figures.py; mistakes: test_cli_mistakes.py."""

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from numba_tconv import __version__, explain
from numba_tconv.lab.cli import commands
from numba_tconv.lab.cli.parser import main
from numba_tconv.lab.machine_code import inspection
from numba_tconv.lab.measure import accuracy, bench, check, mismatch, rows, workloads
from numba_tconv.lab.measure import contestants as named
from numba_tconv.lab.report import tables
from numba_tconv.runtime.device import A100, GPUS, H200
from numba_tconv.selection.forward import select
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS
from tests.command_line import mistake, no_gpu, run
from tests.samples import ladder, row, sweep

ROOT = Path(__file__).parents[2]
RUNGS_OF = {"forward": RUNGS} | {
    of: [name for name, rung in GRADIENTS.items() if rung.of == of] for of in ("grad_input", "grad_weight", "grad_bias")
}


@pytest.fixture
def places(tmp_path):
    data = tmp_path / "data"
    rows.append(data / "some.csv", [*ladder(), *sweep()])
    return "--data", data, "--plots", tmp_path / "plots"


def test_bench_adds_rows_after_each_workload(capsys, measuring, tmp_path):
    out = tmp_path / "rows.csv"
    rows.append(out, [row("patch")])
    code, printed, _ = run(capsys, "bench", "kb64", "audio", "--rung", "k1_gather", "--out", out)
    assert code == 0
    assert [one.workload for one in rows.read(out)] == ["patch", *measuring]
    assert len(measuring) == 6
    assert "kb64 L 65536 float32 ieee k1_gather" in printed


def test_bench_measures_at_another_batch(capsys, measuring, tmp_path):
    out = tmp_path / "rows.csv"
    assert run(capsys, "bench", "head", "istft", "--batch", "1", "--rung", "k1_gather", "--out", out)[0] == 0
    assert [(one.workload, one.length) for one in rows.read(out)] == [("head@batch1", 86), ("istft@batch1", 512)]
    assert workloads.of_row("istft@batch1", 512).problem.batch == 1


@pytest.mark.parametrize("direction", ["grad_input", "grad_weight", "step"])
def test_bench_measures_the_direction_that_is_named(capsys, measuring, tmp_path, direction):
    out = tmp_path / "rows.csv"
    code, printed, _ = run(capsys, "bench", "kb64", "kb74", "--direction", direction, "--out", out)
    assert code == 0
    names, _ = named.rungs_for(["all"], workloads.get("kb64").problem, torch.float32, "ieee", H200, direction)
    assert [(one.workload, one.direction, one.rung) for one in rows.read(out)] == [
        (workload, direction, name) for workload in ("kb64", "kb74") for name in names
    ]
    assert f"kb64 L 65536 {direction} float32 ieee auto" in printed


def test_a_named_rung_is_left_out_where_it_cannot_do_one_of_several_workloads(capsys, measuring, tmp_path):
    out = tmp_path / "rows.csv"
    code, printed, _ = run(capsys, "bench", "kb64", "depthwise", "--rung", "depthwise", "--out", out)
    assert code == 0
    assert [one.workload for one in rows.read(out)] == measuring == ["depthwise"]
    assert "left out: depthwise cannot do" in printed


def test_a_wrong_result_fails_but_keeps_what_is_right(capsys, measuring, tmp_path, monkeypatch):
    def measure(workload, *_, **__):
        raise bench.WrongResult(f"wrong on {workload.name}", [row(workload, "k2_polyphase")])

    monkeypatch.setattr(bench, "measure", measure)
    out = tmp_path / "rows.csv"
    code, _, err = run(capsys, "bench", "kb64", "kb74", "--out", out)
    assert code == commands.FAILED
    assert err.splitlines() == ["numba_tconv: wrong on kb64", "numba_tconv: wrong on kb74"]
    assert [one.rung for one in rows.read(out)] == ["k2_polyphase"] * 2


def test_too_little_memory_is_one_line_and_rows_so_far_are_kept(capsys, measuring, tmp_path, monkeypatch):
    def measure(workload, *_, **__):
        if workload.name == "kb74":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.\nmore")
        return [row(workload)]

    monkeypatch.setattr(bench, "measure", measure)
    out = tmp_path / "rows.csv"
    err = mistake(capsys, "bench", "kb64", "kb74", "--out", out)
    assert err == "numba_tconv: not enough GPU memory: CUDA out of memory. Tried to allocate 1 TiB.\n"
    assert [one.workload for one in rows.read(out)] == ["kb64"]


@pytest.mark.parametrize("weights", ["call", "frozen"])
@pytest.mark.parametrize("command", [("bench", "kb64"), ("sweep", "kb64", "--length", "1024")])
def test_rows_say_where_weights_were_packed(capsys, measuring, compiling, tmp_path, command, weights):
    out = tmp_path / "rows.csv"
    code, printed, _ = run(capsys, *command, "--rung", "auto", "--weights", weights, "--out", out)
    assert code == 0
    assert [one.weights for one in rows.read(out)] == [weights]
    assert (" auto frozen: " in printed) == (weights == "frozen")
    run(capsys, *command, "--rung", "auto", "--out", out)
    assert [one.weights for one in rows.read(out)] == [weights, "call"]


@pytest.mark.parametrize("cc", ["8.0", "12.0"])
def test_inspect_works_without_a_gpu(capsys, cc):
    code, out, _ = run(capsys, "inspect", "k1_gather", "kb79", "--cc", cc)
    assert code == 0
    assert f"sm_{cc.replace('.', '')} " in out
    assert "registers" in out


def test_what_is_inspected_is_the_configuration_of_the_gpu(monkeypatch):
    """Tiles depend on its shared memory."""
    monkeypatch.setattr(inspection.offline, "report", lambda *arguments: arguments)
    problem = workloads.get("kb64").problem
    for device in GPUS.values():
        if device.cc >= (8, 0):
            rung = select(problem, torch.bfloat16, "bf16", device)
            config, ((kernel, cc, _),) = inspection.compiled(rung.name, problem, torch.bfloat16, "bf16", device)
            assert config == rung.config_on(device, problem, torch.bfloat16, "bf16")
            assert (kernel, cc) == (rung.kernel(config), device.cc)


@pytest.mark.parametrize("cc", commands.DEVICES)
def test_explain_takes_every_gpu(capsys, cc):
    code, out, _ = run(capsys, "explain", "dac_u1", "--cc", cc, "--precision", "ieee")
    assert code == 0
    dense = "none: torch's own operator computes it" if cc == "7.5" else "k4_register_tile: "
    assert f"taken      {dense}" in out


def test_inspect_shows_every_kernel_of_a_gradient(capsys):
    code, out, _ = run(capsys, "inspect", "grad_bias", "kb79", "--cc", "8.0", "--dtype", "bfloat16")
    assert code == 0
    assert re.findall(r"^kernel (\w+):", out, re.MULTILINE) == ["grad_bias", "grad_sum"]
    assert out.count("| sm_80 ") == out.count("instructions, most often") == 2


def test_every_instruction_of_a_report_is_counted(capsys, monkeypatch):
    monkeypatch.setattr(inspection.offline.Report, "instruction_mix", Counter(MOV=3, FADD=1))
    inspection.print_report(inspection.offline.Report("", (9, 0), 128, 32, 0, 0, 0, "", b"", ""))
    out = capsys.readouterr().out
    assert "4 instructions, most often" in out
    assert re.search(r"\| MOV +\| +3 \| +75% \|", out)


def test_inspect_of_a_gradient_asks_for_the_precision_and_the_gpu(monkeypatch):
    """Tensor-core rungs have a configuration for each precision."""
    asked = []
    rung = GRADIENTS["grad_input_gather"]
    monkeypatch.setattr(type(rung), "config", lambda _, problem, dtype, **given: asked.append(given))
    monkeypatch.setattr(type(rung), "steps", lambda *_: [])
    problem = workloads.get("kb64").problem
    inspection.compiled("grad_input_gather", problem, torch.bfloat16, "ieee", A100)
    assert asked == [{"device": A100, "precision": "bf16"}]


def test_explain_takes_a_workload_or_sizes(capsys, places):
    sizes = ("--in-channels", 128, "--out-channels", 128, "--kernel-size", 3, "--length", 65536, "--batch", 64)
    texts = [
        run(capsys, "explain", *what, "--precision", "ieee", "--cc", "9.0", *places[:2]) for what in (["kb64"], sizes)
    ]
    assert texts[0] == texts[1]
    code, out, err = texts[0]
    assert (code, err) == (0, "")
    expected = explain("kb64", precision="ieee", device=H200, data=places[1])
    assert out == f"{expected}\n"
    assert expected.recorded_ms


def test_explain_takes_dtype_gpu_and_precision(capsys):
    code, out, _ = run(capsys, "explain", "kb79", "--length", "1000", "--dtype", "bfloat16", "--cc", "8.0")
    assert code == 0
    assert out.startswith("(16, 32->64, k3, s2, p1, d2, L 1000) in bfloat16 on NVIDIA A100\n")
    assert "it needs a GPU of compute capability 9.0, not 8.0" in out


def test_without_a_gpu_the_explanation_says_whose_limits_it_takes(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert " in float32 as on an H200\n" in run(capsys, "explain", "kb64")[1]
    assert " in float32 on NVIDIA H200\n" in run(capsys, "explain", "kb64", "--cc", "9.0")[1]


def test_explain_shows_the_tile_of_any_rung(capsys):
    _, out, _ = run(capsys, "explain", "KB64", "--rung", "k3_shared_tile", "--precision", "ieee")
    assert "taken      k3_shared_tile: " in out
    assert "k4_register_tile  variant is k3_shared_tile" in out
    mistake(capsys, "explain", "kb64", "--rung", "depthwise")


def test_inspect_takes_the_first_precision_of_the_rung(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(inspection, "print_rung", lambda *arguments: asked.append((arguments[0], arguments[3])))
    for rung in ("k4_register_tile", "k6_wgmma", "grad_input_wgmma"):
        assert run(capsys, "inspect", rung, "kb64")[0] == 0
    run(capsys, "inspect", "k6_wgmma", "kb64", "--precision", "tf32x3")
    first = ("k4_register_tile", "ieee"), ("k6_wgmma", "tf32"), ("grad_input_wgmma", "tf32")
    assert asked == [*first, ("k6_wgmma", "tf32x3")]
    asked.clear()
    assert run(capsys, "inspect", "all", "kb64")[0] == 0
    assert {precision for _, precision in asked} == {"ieee"}
    assert {"k4_register_tile", "grad_bias"} < {name for name, _ in asked}


def test_inspect_compiles_another_tile(monkeypatch):
    monkeypatch.setattr(inspection.offline, "report", lambda *arguments: arguments)
    problem, changes = workloads.get("kb79").problem, dict(map(inspection.change, ("stages=3", "aligned=False")))
    of = RUNGS["k6_wgmma"].config_on(H200, problem, torch.float32, "tf32")
    assert (of.stages, of.tile.aligned) != (3, False)
    config, ((kernel, _, shared_bytes),) = inspection.compiled(
        "k6_wgmma", problem, torch.float32, "tf32", changes=changes
    )
    assert config == replace(of, stages=3, tile=replace(of.tile, aligned=False))
    assert kernel is RUNGS["k6_wgmma"].kernel(config)
    assert shared_bytes == config.shared_bytes
    assert inspection.changed(of, {"stages": 1}).stages == 1


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "stage=3": "has no field 'stage'; it has .*stages",
        "stages": "is not FIELD=VALUE",
        "stages=many": "is not FIELD=VALUE",
        "stages=True": "stages must be of the type of",
        "stages=0": "stages must be at least 1",
        "precision='half'": "k6_wgmma cannot be made with precision='half': KeyError: 'half'",
    }.items(),
)
def test_a_tile_that_cannot_be_is_a_mistake(capsys, text, said):
    assert re.search(said, mistake(capsys, "inspect", "k6_wgmma", "kb79", "--set", text))


def test_workloads_are_listed(capsys):
    code, out, _ = run(capsys, "workloads")
    assert code == 0
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines()]
    assert [name for name, *_ in cells[2:]] == list(workloads.WORKLOADS)
    assert ["kb79", "KernelBench", "level 1, problem 79: strided"] in [line[:3] for line in cells]
    assert ["16", "32 to 64", "131072", "3", "2", "padding 1, dilation 2"] in [line[3:] for line in cells]


@pytest.mark.parametrize("name", ["numba-tconv", "__main__.py"])
def test_usage_names_the_command_that_was_typed(capsys, monkeypatch, name):
    monkeypatch.setattr(sys, "argv", [f"bin/{name}"])
    code, out, _ = run(capsys, "explain", "--help")
    assert code == 0
    assert out.startswith(f"usage: {'numba-tconv' if name == 'numba-tconv' else 'python -m numba_tconv'} explain ")
    assert "channels of the input" in out
    assert run(capsys, "--version") == (0, f"numba_tconv {__version__}\n", "")


@pytest.mark.thorough
def test_a_reader_that_has_seen_enough_is_no_error():
    command = (sys.executable, "-m", "numba_tconv", "explain", "kb64")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_a_full_disk_is_told():
    with open("/dev/full", "w") as full:
        command = (sys.executable, "-m", "numba_tconv", "workloads")
        process = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (process.returncode, process.stderr) == (commands.MISTAKE, "numba_tconv: No space left on device\n")


def test_a_closed_output_is_none(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["workloads"]) == 0


def test_info_tells_versions(capsys):
    code, out, _ = run(capsys, "info")
    assert code == 0
    for name in ("Python", "driver", "torch", "numba-cuda", "ptxas"):
        assert name in out


@no_gpu
@pytest.mark.parametrize("argv", [["fuzz", "--count", "3"], ["check", "--small"]], ids=" ".join)
def test_what_needs_a_gpu_runs_in_the_simulator_where_there_is_none(capsys, monkeypatch, argv):
    monkeypatch.setattr(commands, "in_simulator", lambda given: 1 if given == argv else 0)
    assert run(capsys, *argv)[0] == 1


@pytest.mark.thorough
@no_gpu
def test_check_runs_in_the_simulator_where_there_is_no_gpu():
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    sizes = ("--batch", "1", "--in-channels", "2", "--out-channels", "2", "--length", "6", "--no-bias")
    command = (sys.executable, "-m", "numba_tconv", "check", *sizes)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "in the CUDA simulator" in done.stdout
    for result, rungs in RUNGS_OF.items():
        _, after = done.stdout.split(f"| {result} by ")
        shown = after.partition("\n\n")[0].splitlines()
        for name in ("scatter loops", *rungs):
            (line,) = [line for line in shown if line.startswith(f"| {name} ")]
            assert "right" in line or "the CUDA simulator has no tensor cores" in line


@pytest.mark.parametrize("result", RUNGS_OF)
def test_check_fails_where_any_result_is_wrong(capsys, monkeypatch, result):
    monkeypatch.setattr(check, "where", lambda: "here")
    outcomes = [(of, check.Outcome("torch", accuracy.Error(0, 0), of != result)) for of in RUNGS_OF]
    monkeypatch.setattr(check, "parity", lambda *_: iter(outcomes))
    found = commands.check_one(check.SMALL[0], torch.float32, "ieee")
    assert [outcome.right for _, outcome in found] == [of != result for of in RUNGS_OF]
    out, _ = capsys.readouterr()
    assert out.count("| WRONG |") == 1
    assert out.index(f"| {result} by ") < out.index("WRONG")


def test_check_prints_every_result_and_where_an_output_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(check, "where", lambda: "here")
    where = mismatch.Mismatch(0, 1, 2, 1, 3.0, 4.0, 5, 60, "all of phase 1")
    wrong = check.Outcome("one", accuracy.Error(1, 2), False, where=where)
    assert wrong.cells() == ["one", "1.00e+00", "2.00e+00", "WRONG"]
    outcomes = {of: [check.Outcome(f"{of} of another", None, True, "refused")] for of in RUNGS_OF}
    outcomes["forward"].append(wrong)
    monkeypatch.setattr(check, "parity", lambda *_: ((of, one) for of, some in outcomes.items() for one in some))
    commands.check_one(check.SMALL[0], torch.float32, "tf32")
    expected = [f"{check.SMALL[0]}, tf32, here; errors against float64"]
    for of, some in outcomes.items():
        expected.append(tables.markdown([f"{of} by", "norm", "largest", ""], [one.cells() for one in some]))
    assert capsys.readouterr().out == "".join(f"\n{part}\n" for part in [*expected, f"one: {where}"])


@pytest.mark.parametrize("right", [True, False, None])
def test_check_that_no_rung_can_do_is_a_mistake(capsys, monkeypatch, right):
    """All rungs refuse the first of several problems, and torch is compared with itself."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check, "where", lambda: "here")

    def parity(problem, *_):
        first = problem == check.SMALL[0]
        done = None if first and right is None else accuracy.Error(0, 0)
        yield "forward", check.Outcome("torch", accuracy.Error(0, 0), True)
        yield "forward", check.Outcome("k1_gather", done, not first or right is not False)

    monkeypatch.setattr(check, "parity", parity)
    code, _, err = run(capsys, "check", "--small", "--precision", "tf32")
    assert code == {True: 0, False: commands.FAILED, None: commands.MISTAKE}[right]
    assert ("no rung computes" in err) == (right is None)


@pytest.mark.gpu
def test_check_on_the_gpu(capsys):
    code, out, _ = run(capsys, "check", "--small")
    assert code == 0
    assert torch.cuda.get_device_name() in out
