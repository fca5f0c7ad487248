"""The command that compiles ahead: of workloads, of a layer of given sizes, or of somebody's model."""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import replace

from . import bench, cache, commands, compile_ahead, inspection, workloads
from .commands import Mistake
from .directions import FORWARD, STEP
from .kernels.device import Device, current_device
from .launch import target
from .noted import transposed_convolutions

SETS = ["kernelbench", "audio"]  # where nothing is named


def run_compile(arguments) -> int:
    """Compile what is needed into the cache on disk, unless it is there."""
    device = current_device()
    if arguments.cc and commands.DEVICES[arguments.cc].cc != device.cc:
        device = commands.DEVICES[arguments.cc]
    models = [name for name in arguments.what if ":" in name]
    names = [name for name in arguments.what if name not in models]
    with commands.mistakes():
        calls = [call for name in models for call in _calls_of_model(name, arguments, device)]
        if names or not models:
            calls += _calls_of_problems(names, arguments, device)
    commands.require_compiler()
    try:
        folder = cache.writable()
    except RuntimeError as error:
        raise Mistake(str(error)) from error
    except OSError as error:
        raise Mistake(error.strerror) from error
    began, cc = time.monotonic(), target(device.cc)
    compiled, kept = compile_ahead.fill(calls, cc, arguments.jobs or os.cpu_count() or 1)
    took, where = time.monotonic() - began, inspection.architecture(cc)
    print(f"kernels for {where}: {compiled} compiled in {took:.0f} s, {kept} there already, in {folder}")
    return 0


def _calls_of_problems(names: list[str], arguments, device: Device) -> list[compile_ahead.Call]:
    """Of workloads, with the sizes that were given; without a name, of the layer that has them."""
    sizes = commands.given_sizes(arguments)
    alone = not names and sizes.keys() - {"batch"}
    if alone:
        commands.require_sizes(arguments)
        problems = [replace(commands.ONE_ELEMENT, **sizes)]
    else:
        problems = [replace(one.problem, **sizes) for one in workloads.expand(names or SETS)]
    arithmetic = [
        (bench.DTYPES[dtype], precision)
        for dtype in arguments.dtype or ["float32"]
        for precision in arguments.precision or ["ieee"]
    ]
    rungs = arguments.rung or ([bench.AUTO] if alone else ["all"])
    return compile_ahead.calls(rungs, problems, arithmetic, device, arguments.direction)


def _calls_of_model(name: str, arguments, device: Device) -> list[compile_ahead.Call]:
    """Of the model and the inputs that the function "module:function" returns, as ``warm`` finds them."""
    if arguments.direction not in (FORWARD, STEP):
        raise Mistake(f"of {name} the forward pass or a step can be compiled, not {arguments.direction} alone")
    module, _, function = name.partition(":")
    try:
        example = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise Mistake(f"there is no {name}: {error}") from error
    made = example()
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise Mistake(f"{name} must return a tuple of a model and the inputs of a call, not {type(made).__name__}")
    model, *inputs = made
    return compile_ahead.calls_of(transposed_convolutions(model, *inputs), device, arguments.direction)
