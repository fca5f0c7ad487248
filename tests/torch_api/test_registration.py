"""Functions registered with torch stay functions: some versions of its ``impl`` return None as a decorator."""

import subprocess
import sys

SCRIPT = """
import ast, importlib, inspect, pkgutil
import torch

impl = torch.library.impl


def returns_nothing(*arguments, **keywords):
    made = impl(*arguments, **keywords)
    return (lambda function: made(function) and None) if callable(made) else None


torch.library.impl = returns_nothing
from numba_tconv import torch_api

for found in pkgutil.iter_modules(torch_api.__path__):
    module = importlib.import_module(f"numba_tconv.torch_api.{found.name}")
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef) and not callable(getattr(module, node.name)):
            print(module.__name__, node.name)
print("looked")
"""


def test_a_registered_function_can_still_be_called():
    done = subprocess.run((sys.executable, "-c", SCRIPT), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr[-2000:]) == (0, "looked\n", done.stderr[-2000:])
