"""Commands' whole outputs and what they ask for; numbers and times on a command line; exit codes."""

import argparse
import errno
import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from numba_tconv.lab.cli import commands, compile_run, demo, study_runs
from numba_tconv.lab.cli import parser as cli
from numba_tconv.lab.measure import accuracy, bench, check, rows, search, workloads
from numba_tconv.lab.studies import kernelbench, streaming
from numba_tconv.runtime.device import H200
from tests.command_line import mistake, run
from tests.samples import result, row, stepped


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(commands, "current_device", lambda: H200)
    monkeypatch.setattr(commands.named, "current_device", lambda: H200)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ((), (torch.float32, "ieee", "forward", "call", 30, 1.0)),
        (("--precision", "tf32", "--repeats", 3), (torch.float32, "tf32", "forward", "call", 3, 1.0)),
        (("--dtype", "bfloat16", "--budget", 0.5), (torch.bfloat16, "ieee", "forward", "call", 30, 0.5)),
        (("--weights", "frozen"), (torch.float32, "ieee", "forward", "frozen", 30, 1.0)),
    ],
)
def test_bench_asks_for_what_is_named_and_prints_all_of_it(capsys, on_a_gpu, monkeypatch, tmp_path, options, asked):
    seen, out = [], tmp_path / "rows.csv"

    def measure(workload, rungs, *arithmetic, weights, repeats, budget_s):
        seen.append((workload.name, rungs, (*arithmetic, weights, repeats, budget_s)))
        return [row(workload, rung) for rung in rungs]

    monkeypatch.setattr(bench, "measure", measure)
    code, printed, err = run(
        capsys, "bench", "small", "head", "--rung", "auto", "--rung", "cudnn", *options, "--out", out
    )
    assert (code, err) == (0, "")
    assert seen == [(name, ["auto", "cudnn"], asked) for name in ("small", "head")]
    lines = [commands.describe(row(name, rung)) for name in ("small", "head") for rung in ("auto", "cudnn")]
    assert printed.splitlines() == [*lines, f"rows added to {out}"]


def test_what_is_left_out_is_said_once_for_each_workload(capsys, on_a_gpu, monkeypatch, tmp_path):
    """Of several workloads, those that no named rung can do are not measured."""
    monkeypatch.setattr(bench, "measure", lambda workload, rungs, *_, **__: [row(workload, rung) for rung in rungs])
    out = tmp_path / "rows.csv"
    options = ("--rung", "depthwise", "--rung", "k1_gather", "--rung", "k1_gather", "--out", out)
    _, printed, _ = run(capsys, "bench", "kb64", "depthwise", *options)
    first, *others = printed.splitlines()
    assert first.startswith("left out: depthwise cannot do (64, 128->128, k3, s1, L 65536) in ieee: ")
    names = ("kb64", "k1_gather"), ("depthwise", "depthwise"), ("depthwise", "k1_gather")
    assert others == [*(commands.describe(row(*one)) for one in names), f"rows added to {out}"]
    _, printed, _ = run(capsys, "bench", "kb64", "depthwise", *options[:2], *options[-2:])
    assert printed.splitlines() == [first, commands.describe(row("depthwise", "depthwise")), f"rows added to {out}"]


def test_rows_of_calls_between_which_others_ran_are_said_to_be_disturbed():
    said = " ms, measure again"
    for p80, disturbed in ((1.25, False), (1.26, True)):
        line = commands.describe(row(ms_p20=1.0, ms_p50=1.1, ms_p80=p80))
        assert line.endswith(f"; disturbed: calls took 1 to {p80}{said}") == disturbed
        assert (said in line) == disturbed


def test_the_search_says_what_it_found(capsys, on_a_gpu, monkeypatch, tmp_path):
    asked, out = [], tmp_path / "k6.csv"
    values = dict(search.described(search.configs(workloads.get("kb64").problem, "tf32")[0]))
    where = dict(time="t", commit="c", gpu="g")

    def measure(workload, dtype, precision):
        asked.append((workload.name, dtype, precision))
        times = dict(ms_p50=3.0, chosen=False), dict(ms_p50=1.5, chosen=False), dict(ms_p50=2.0, chosen=True)
        return [search.Tried(**where, workload=workload.name, precision=precision, **values, **one) for one in times]

    monkeypatch.setattr(search, "measure", measure)
    monkeypatch.setattr(search, "compile_all", lambda found, jobs: asked.append((len(found), jobs)))
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    code, printed, _ = run(capsys, "search", "kb64", "depthwise", "small", "--out", out)
    assert code == 0
    found = sum(len(search.configs(workloads.get(name).problem, "tf32")) for name in ("kb64", "small"))
    assert asked == [(found, 3), ("kb64", torch.float32, "tf32"), ("small", torch.float32, "tf32")]
    best = "3 configurations, the best 1.5 ms, taken 2 ms"
    assert printed == f"kb64 tf32: {best}\nsmall tf32: {best}\nrows added to {out}\n"
    assert len(rows.read(out, search.Tried)) == 6
    err = mistake(capsys, "search", "depthwise", "--dtype", "float16", "--out", out)
    assert err == "numba_tconv: k6_wgmma can do none of the workloads in fp16 on this GPU\n"


def test_kernelbench_says_all_of_its_results(capsys, on_a_gpu, monkeypatch, tmp_path):
    made = {
        64: result(64, passed=0, relerr=1e-6, torch_relerr=3e-3, largest_error=1e-6),
        74: result(74, passed=2, relerr=1.0),
        79: result(79),
    }
    monkeypatch.setattr(kernelbench, "run", made.get)
    out = tmp_path / "rows.csv"
    code, printed, _ = run(capsys, "kernelbench", "--out", out)
    assert code == 1
    assert printed == (
        "KernelBench level 1 on H200; errors are relative norms against float64,\n"
        "times the mean of 100 calls on a cold L2, torch with its default switches\n\n"
        f"{kernelbench.markdown(made.values())}\n\n"
        "Problem 64 fails the comparison because of torch's output, not of ours: torch's is 3,000 times as far from "
        "float64. By default torch multiplies float32 in TF32.\n"
        "Problem 74: our output is too far from float64, or of another shape; no row is kept.\n"
        f"rows added to {out}\n"
    )
    assert rows.read(out, kernelbench.Result) == [made[64], made[79]]
    made[79] = result(79, passed=4, relerr=5e-4)  # right, but less exact than torch, and not accepted
    assert run(capsys, "kernelbench", "79", "--out", out)[0] == 1
    assert run(capsys, "kernelbench", "64", "--out", out)[0] == 0


def test_streaming_takes_every_layer_and_size(capsys, on_a_gpu, monkeypatch, tmp_path):
    asked, out = [], tmp_path / "rows.csv"
    made = [stepped(), stepped(mode="eager")]
    monkeypatch.setattr(streaming, "measure", lambda *case: asked.append(case) or made)
    options = ("--dtype", "float16", "--batch", 3, "--batch", 5, "--frames", 7, "--out", out)
    code, printed, _ = run(capsys, "streaming", "mimi_2", "mimi_1", "mimi_2", *options)
    assert code == 2
    options = ("--dtype", "bfloat16", *options[2:])
    code, printed, _ = run(capsys, "streaming", "mimi_2", "mimi_1", "mimi_2", *options)
    assert code == 0
    assert asked == [(layer, "bfloat16", batch, 7) for layer in ("mimi_2", "mimi_1") for batch in (3, 5)]
    assert printed.splitlines() == [*map(streaming.describe, made)] * 4 + [f"rows added to {out}"]
    assert rows.read(out, streaming.Timed) == made * 4
    monkeypatch.setattr(study_runs, "record_each", lambda cases, *others: asked.append((*cases,)) or (*others,) != how)
    how = streaming.measure, streaming.describe, out
    assert run(capsys, "streaming", "--out", out)[0] == 0
    every = itertools.product(streaming.LAYERS, streaming.DTYPES, streaming.BATCHES, streaming.FRAMES)
    assert asked[-1] == (*every,)
    assert mistake(capsys, "streaming", "mimi_1", "b", "a") == (
        f"numba_tconv: no layer 'a'; there are {', '.join(streaming.LAYERS)}\n"
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), check.SMALL[0]),
        (("--length", 9), replace(check.SMALL[0], length=9)),
        (("small", "--batch", 2, "--bias"), replace(workloads.get("small").problem, batch=2, bias=True)),
    ],
)
def test_check_is_of_the_named_problem(capsys, on_a_gpu, monkeypatch, options, problem):
    asked = []

    def check_one(*case):
        asked.append(case)
        return [("forward", check.Outcome("k1_gather", accuracy.Error(0, 0), True))]

    monkeypatch.setattr(commands, "check_one", check_one)
    assert run(capsys, "check", *options, "--dtype", "float64")[0] == 0
    assert asked == [(problem, torch.float64, "ieee")]


def test_sizes_are_not_given_for_a_model(capsys):
    options = ("--in-channels", 4, "--no-bias", "--rung", "auto", "--dtype", "float16")
    said = "--in-channels, --bias, --rung, --dtype cannot be given for a model, which has its own"
    assert mistake(capsys, "compile", "here:model", *options) == f"numba_tconv: {said}\n"


@pytest.mark.parametrize("code", [0, 1])
def test_the_simulator_is_asked_in_another_process(monkeypatch, code):
    asked = []
    monkeypatch.setattr(
        subprocess, "run", lambda *given, **how: asked.append((given, how)) or SimpleNamespace(returncode=code)
    )
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **how: asked.append((given, how)))
    monkeypatch.setenv("KEPT", "here")
    assert commands.in_simulator(["check", "--small"]) == code
    demo.start_simulator()
    command = ([sys.executable, "-m", "numba_tconv", "check", "--small"],)
    environment = dict(os.environ) | {"NUMBA_ENABLE_CUDASIM": "1"}
    piped = dict(env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert asked == [(command, dict(env=environment)), (command, piped)]


def test_the_simulator_neither_measures_nor_compiles(capsys, on_a_gpu, monkeypatch):
    monkeypatch.setattr(commands, "SIMULATOR", True)
    said = "numba_tconv: this needs a GPU, and NUMBA_ENABLE_CUDASIM asks for the simulator: unset it\n"
    assert mistake(capsys, "bench", "kb64") == said
    monkeypatch.setattr(compile_run, "current_device", lambda: H200)
    said = "numba_tconv: the simulator compiles nothing: unset NUMBA_ENABLE_CUDASIM\n"
    assert mistake(capsys, "inspect", "k1_gather") == said
    assert mistake(capsys, "compile", "kb64", "--cc", "9.0") == said


# --- exit codes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 0, ""),
        (commands.Mistake("no"), 2, "numba_tconv: no\n"),
        (rows.RowsError("no"), 2, "numba_tconv: no\n"),
        (torch.OutOfMemoryError("all is taken\nmore"), 2, "numba_tconv: not enough GPU memory: all is taken\n"),
        (KeyboardInterrupt(), 130, "numba_tconv: interrupted; what was finished is kept\n"),
        (OSError(errno.ENOSPC, "full"), 2, "numba_tconv: full\n"),
        (BrokenPipeError(errno.EPIPE, "closed"), 141, ""),
    ],
    ids=repr,
)
def test_every_end_has_its_exit_code(capsys, monkeypatch, error, code, said):
    def command(_):
        if error:
            raise error

    monkeypatch.setattr(commands, "run_info", command)
    assert run(capsys, "info") == (code, "", said)
    assert (commands.FAILED, commands.MISTAKE) == (1, 2)


def test_other_errors_are_not_hidden(capsys, monkeypatch):
    def command(_):
        raise PermissionError(errno.EACCES, "not allowed")

    monkeypatch.setattr(commands, "run_info", command)
    with pytest.raises(PermissionError):
        cli.main(["info"])


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("1024", 1024), ("2**10", 1024), ("3**1", 3), ("2**62", 2**62), ("9" * 18, 10**18 - 1), ("7**0", 1)]
    + [(text, None) for text in ("2**63", "9" * 19, "2**100", "-1", "1.5", "2**", "**2", "1e3", "2*3")],
)
def test_whole_numbers(text, number):
    for kind in (cli.whole_number, cli.positive):
        if number is None or (kind is cli.positive and not number):
            with pytest.raises(argparse.ArgumentTypeError, match=re.escape("must be" if text == "0" else text)):
                kind(text)
        else:
            assert kind(text) == number


def test_durations():
    assert [cli.duration(text) for text in ("4", "0.5", "1e-3")] == [4.0, 0.5, 0.001]
