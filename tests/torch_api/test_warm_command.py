"""The command that compiles ahead: for a function's model, for sizes, for workloads; and its mistakes."""

import importlib
import sys
from functools import partial

import pytest
import torch
from torch import nn

import numba_tconv
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.cli import commands, compile_run
from numba_tconv.lab.cli import parser as cli
from numba_tconv.lab.measure import bench, workloads
from numba_tconv.runtime.device import H200
from numba_tconv.selection.registry import RUNGS
from numba_tconv.torch_api.compile_ahead import calls_of
from numba_tconv.torch_api.noted import Noted
from tests import command_line

pytest_plugins = "tests.not_compiled"
PROBLEM = Problem(2, 16, 24, 8, 100, stride=4, padding=2, bias=True)
FOUND = [Noted(PROBLEM, torch.float32, "", "ieee")]


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_TCONV_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setattr(importlib.import_module("numba_tconv.torch_api.warm"), "current_device", lambda: H200)
    monkeypatch.setattr(compile_run, "current_device", lambda: H200)
    with bench.torch_switches(tf32=False):
        yield


class Scaled(nn.ConvTranspose1d):
    def forward(self, x, scale):
        return super().forward(x) * scale


def example():
    return Scaled(16, 24, 8, 4, 2), torch.empty(2, 16, 100), torch.ones(24, 1)


HERE = f"{__name__}:"


def run(capsys, *argv):
    """Exit code, stdout and stderr of the command."""
    return cli.main(["warm", *map(str, argv)]), *capsys.readouterr()


@pytest.mark.parametrize("direction", ["forward", "step"])
def test_the_command_takes_a_function_that_makes_a_model(filled, capsys, direction):
    code, out, _ = run(capsys, HERE + "example", "--direction", direction, "--jobs", 5)
    assert (code, filled.calls, filled.jobs) == (0, calls_of(FOUND, H200, direction), 5)
    assert out.startswith("kernels for sm_90a: 3 compiled in 0 s, 5 there already, in ")


def test_the_console_script_finds_modules_in_the_current_folder(filled, capsys, tmp_path, monkeypatch):
    (tmp_path / "made_here.py").write_text(f"from {__name__} import example\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    assert run(capsys, "made_here:example")[0] == 0


def test_the_command_takes_sizes(filled, capsys):
    sizes = ("--in-channels", 16, "--out-channels", 24, "--kernel-size", 8, "--length", 100, "--stride", 4)
    assert run(capsys, *sizes, "--padding", 2, "--batch", 2, "--bias")[0] == 0
    assert filled.calls == calls_of(FOUND[:1], H200)
    assert run(capsys, "kb64", "--batch", 3, "--length", 77, "--rung", "auto")[0] == 0
    assert [(call.problem.batch, call.problem.length) for call in filled.calls] == [(3, 77)]
    assert run(capsys, "kb64", HERE + "example", "--rung", "auto")[0] == 0
    assert len(filled.calls) == len(FOUND) + 1
    assert run(capsys, "--batch", 1, "--precision", "ieee")[0] == 0  # the default workloads
    assert len(filled.calls) == len(workloads.expand(compile_run.SETS))


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("direction", ["forward", "step"])
def test_what_is_named_by_sizes_or_workload_is_what_a_call_launches(filled, capsys, tf32, direction):
    """In the precision that torch's switch allows, as in a call."""
    p = workloads.get("hifigan_u3").problem
    layer = nn.ConvTranspose1d(p.in_channels, p.out_channels, p.kernel_size, p.stride, p.padding, bias=False)
    sizes = ("--in-channels", p.in_channels, "--out-channels", p.out_channels, "--kernel-size", p.kernel_size)
    sizes += ("--length", p.length, "--stride", p.stride, "--padding", p.padding, "--batch", p.batch)
    with bench.torch_switches(tf32=tf32):
        numba_tconv.warm(layer, torch.empty(p.in_shape), training=direction == "step")
        expected = filled.calls
        assert {call.precision for call in expected} - {"ieee"} == ({"tf32"} if tf32 else set())
        for what in (sizes, ["hifigan_u3"]):
            assert run(capsys, *what, "--direction", direction)[0] == 0
            assert filled.calls == expected, what


def test_a_rung_that_is_named_is_compiled_in_the_precision_of_its_calls(filled, capsys):
    with bench.torch_switches(tf32=True):
        assert run(capsys, "kb64", "--rung", "k4_register_tile", "--rung", "k6_wgmma")[0] == 0
        assert [(call.rung, call.precision) for call in filled.calls] == [
            ("k4_register_tile", "ieee"), ("k6_wgmma", "tf32")
        ]  # fmt: skip
        assert run(capsys, "kb64", "--rung", "all")[0] == 0
        assert {call.rung: call.precision for call in filled.calls} == {
            name: rungs_precision(name) for name in RUNGS if name not in ("depthwise", "k5_dmma")
        }


def rungs_precision(name):
    return "tf32" if name in ("k5_mma", "k6_wgmma") else "ieee"


def no_model():
    return 3


def without_layers():
    return nn.Conv1d(8, 8, 3), torch.empty(1, 8, 20)


def deep_down():
    raise KeyError("the weights are elsewhere")


def raising():
    return deep_down()


def refusing():
    def model(x):
        return deep_down()

    return model, torch.empty(1, 8, 20)


def lazy():
    return nn.LazyConvTranspose1d(24, 8), torch.empty(1, 8, 20)


not_a_function = 3


@pytest.mark.parametrize("name", ["raising", "refusing"])
def test_what_the_users_function_raises_is_shown_with_where(filled, capsys, name):
    code, _, err = run(capsys, HERE + name)
    assert code == commands.MISTAKE
    *trace, said = err.splitlines()
    assert said == f"numba_tconv: {HERE}{name} raised KeyError: 'the weights are elsewhere'"
    assert trace[0] == "Traceback (most recent call last):"
    assert "in deep_down" in err
    assert "compile_run.py" not in err


def test_a_module_that_lacks_another_says_where(filled, capsys, tmp_path, monkeypatch):
    (tmp_path / "half_a_module.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = run(capsys, "half_a_module:example")
    assert (code, filled.calls) == (commands.MISTAKE, [])
    assert 'half_a_module.py", line 1' in err
    assert err.splitlines()[-1].endswith("raised ModuleNotFoundError: No module named 'no_such_module_at_all'")


def test_the_commands_mistakes_get_one_line(filled, capsys):
    mistake = partial(command_line.mistake, capsys, "warm")
    assert "there is no no_such_module:example" in mistake("no_such_module:example")
    assert f"there is no {HERE}nothing" in mistake(HERE + "nothing")
    assert "must return a tuple of a model and the inputs of a call, not int" in mistake(HERE + "no_model")
    assert f"{HERE}not_a_function must be a function that makes a model, not int" in mistake(HERE + "not_a_function")
    assert "there is no :example" in mistake(":example")
    assert "there is no .relative:example" in mistake(".relative:example")
    assert "has no transposed convolution" in mistake(HERE + "without_layers")
    assert "raised RuntimeError: weight is lazy" in mistake(HERE + "lazy")
    assert "--stride, --precision cannot be given for a model" in mistake(
        HERE + "example", "--stride", 2, "--precision", "ieee"
    )
    assert "k6_wgmma cannot do" in mistake("small", "--rung", "k6_wgmma", "--precision", "ieee")
    assert "no precision 'tf32'" in mistake("small", "--dtype", "float64", "--precision", "tf32")
    assert "torch's own operator computes" in mistake("kb64", "--cc", "7.5")
    assert "a model is compiled for the forward pass or a step" in mistake(
        HERE + "example", "--direction", "grad_input"
    )
    assert "give --out-channels, --kernel-size, --length too" in mistake("--in-channels", 16)
