"""What importing loads and does, in fresh processes."""

import functools
import json
import os
import subprocess
import sys

import torch

from .test_packaging import MODULES, ROOT

NAMES = [f"numba_tconv.{name}".removesuffix(".") for name in MODULES if name != "__main__"]
# The package is imported first, then what it loads on first use, the command line, and every module. Some versions of
# torch's ``impl`` return None as a decorator.
SCRIPT = f"""
import ast, importlib, inspect, json, sys
import torch

impl = torch.library.impl


def returns_nothing(*arguments, **keywords):
    made = impl(*arguments, **keywords)
    return (lambda function: made(function) and None) if callable(made) else None


torch.library.impl = returns_nothing
import numba_tconv

package = [*sys.modules]
on_first_use = [name for name in ("explain", "warm", "Explanation") if callable(getattr(numba_tconv, name))]
from numba_tconv.lab.cli import parser

parser.parser()
command_line, no_functions = [*sys.modules], []
for name in {NAMES}:
    module = importlib.import_module(name)
    for node in ast.parse(inspect.getsource(module)).body if name.startswith("numba_tconv.torch_api") else ():
        if isinstance(node, ast.FunctionDef) and not callable(getattr(module, node.name)):
            no_functions.append(f"{{name}}.{{node.name}}")
import reference

gpu = torch.cuda.is_initialized()
print(json.dumps(dict(package=package, on_first_use=on_first_use, command_line=command_line,
                      no_functions=no_functions, gpu=gpu)))
"""


@functools.cache
def imported(sees_gpus=False):
    """What SCRIPT found."""
    environment = os.environ if sees_gpus else os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run((sys.executable, "-c", SCRIPT), cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_module_imports_without_touching_a_gpu():
    """With and without one in sight."""
    assert not imported()["gpu"]
    assert not torch.cuda.is_available() or not imported(sees_gpus=True)["gpu"]


def test_the_package_loads_nothing_of_the_lab():
    """``explain`` loads it on first use."""
    found = imported()
    assert not [name for name in found["package"] if name.startswith("numba_tconv.lab")]
    assert not {"matplotlib", "numba_tconv.torch_api.warm"} & {*found["package"]}
    assert found["on_first_use"] == ["explain", "warm", "Explanation"]


def test_a_plain_import_leaves_distributed_tensors_alone():
    """They are slow to import; the rules are registered once they are loaded."""
    assert not {"torch.distributed.tensor", "torch._dynamo"} & {*imported()["package"]}


def test_help_needs_no_matplotlib():
    assert "matplotlib" not in imported()["command_line"]


def test_a_registered_function_can_still_be_called():
    """Whatever ``impl`` returns."""
    assert imported()["no_functions"] == []
