"""Command ``compile``."""

import contextlib
import importlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from numba_tconv.lab.machine_code import inspection
from numba_tconv.lab.measure import bench, workloads
from numba_tconv.lab.measure import contestants as named
from numba_tconv.runtime import cache
from numba_tconv.runtime.device import Device, current_device
from numba_tconv.runtime.kernel import architecture, target
from numba_tconv.selection.directions import FORWARD, STEP
from numba_tconv.torch_api import compile_ahead
from numba_tconv.torch_api.noted import computations

from . import commands, named_calls
from .commands import Mistake

SETS = ["kernelbench", "audio"]


def run_compile(arguments) -> int:
    device = current_device()
    if arguments.cc and commands.DEVICES[arguments.cc].cc != device.cc:
        device = commands.DEVICES[arguments.cc]
    models = [name for name in arguments.what if ":" in name]
    names = [name for name in arguments.what if name not in models]
    if models and not names and (ignored := _for_problems(arguments)):
        raise Mistake(f"{', '.join(ignored)} cannot be given for a model, which has its own")
    calls = [call for name in models for call in _calls_of_model(name, arguments, device)]
    if names or not models:
        with commands.mistakes():
            calls += _calls_of_problems(names, arguments, device)
    commands.require_compiler()
    try:
        folder = cache.writable()
    except RuntimeError as error:
        raise Mistake(str(error)) from error
    except OSError as error:
        raise Mistake(error.strerror) from error
    began = time.monotonic()
    try:
        compiled, kept = compile_ahead.fill(calls, target(device.cc), arguments.jobs or os.cpu_count() or 1)
    except OSError as error:
        raise Mistake(str(error)) from error
    took, where = time.monotonic() - began, inspection.sm(architecture(device.cc))
    print(f"kernels for {where}: {compiled} compiled in {took:.0f} s, {kept} there already, in {folder}")
    return 0


def _for_problems(arguments) -> list[str]:
    given = [*commands.given_sizes(arguments), *(f for f in ("rung", "dtype", "precision") if getattr(arguments, f))]
    return ["--" + name.replace("_", "-") for name in given]


def _calls_of_problems(names: list[str], arguments, device: Device) -> list[compile_ahead.Call]:
    sizes = commands.given_sizes(arguments)
    if not names and sizes.keys() - {"batch"}:
        commands.require_sizes(arguments)
        problems = [replace(commands.ONE_ELEMENT, **sizes)]
    else:
        problems = [replace(one.problem, **sizes) for one in workloads.expand(names or SETS)]
    if empty := [problem for problem in problems if 0 in problem.out_shape]:
        raise Mistake(f"{empty[0]} has no outputs")
    dtypes = arguments.dtype or ["float32"]
    precisions = [commands.checked_precision(dtypes, one) for one in arguments.precision or [None]]
    arithmetic = [(bench.DTYPES[dtype], precision) for dtype in dtypes for precision in precisions]
    rungs = arguments.rung or [named.AUTO]
    calls = named_calls.calls(rungs, problems, arithmetic, device, arguments.direction)
    if not calls:
        for dtype, precision in arithmetic:
            own = precision or commands.own_precision(rungs[0], arguments.direction, problems[0], dtype)
            named.rungs_for(rungs, problems[0], dtype, own, device, arguments.direction)
        raise Mistake(f"torch's own operator computes {problems[0]} on that GPU: there is nothing to compile")
    return calls


def _calls_of_model(name: str, arguments, device: Device) -> list[compile_ahead.AnyCall]:
    """Calls of the model and inputs that "module:function" returns."""
    if arguments.direction not in (FORWARD, STEP):
        raise Mistake(f"a model is compiled for the forward pass or a step, not for {arguments.direction} alone")
    with _theirs(name):
        made = _function(name)()
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise Mistake(f"{name} must return a tuple of a model and the inputs of a call, not {type(made).__name__}")
    model, *inputs = made
    with _theirs(name):
        noted = computations(model, *inputs)
    with commands.mistakes():
        calls = compile_ahead.calls_of(noted, device, arguments.direction)
    if not calls:
        raise Mistake(
            f"the model of {name} has no transposed convolution or activation that this package computes on such a GPU"
        )
    return calls


def _function(name: str):
    module, _, function = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as python -m
    try:
        found = importlib.import_module(module)
    except (ModuleNotFoundError, ValueError, TypeError) as error:
        # Its own missing imports keep tracebacks.
        if isinstance(error, ModuleNotFoundError) and not f"{module}.".startswith(f"{error.name}."):
            raise
        raise Mistake(f"there is no {name}: {error}") from error
    if not hasattr(found, function):
        raise Mistake(f"there is no {name}: module {module!r} has no attribute {function!r}")
    found = getattr(found, function)
    if not callable(found):
        raise Mistake(f"{name} must be a function that makes a model, not {type(found).__name__}")
    return found


@contextlib.contextmanager
def _theirs(name: str) -> Iterator[None]:
    """The user's exceptions become Mistake."""
    try:
        yield
    except Mistake:
        raise
    except Exception as error:
        trace = error.__traceback__
        while trace and _is_ours(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        if trace:
            traceback.print_exception(error.with_traceback(trace))
        said = str(error).partition("\n")[0]
        raise Mistake(f"{name} raised {type(error).__name__}{said and ': '}{said}") from error


def _is_ours(file: str) -> bool:
    return Path(__file__).parents[2] in Path(file).parents or "importlib" in file
