"""The output of ``inspect``."""

import ast
from dataclasses import fields, is_dataclass, replace

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import bench
from numba_tconv.lab.measure.workloads import Workload
from numba_tconv.lab.report import tables as table
from numba_tconv.runtime.device import H200, Device
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS

from . import offline

MOST_COMMON = 12
REPORT_HEADER = ["compiled for", "threads", "registers", "spilled B", "local B", "shared B", "occupancy"]


def compiled(
    name: str, problem: Problem, dtype: torch.dtype, precision: str, device: Device = H200, changes: dict | None = None
) -> tuple:
    """A rung's configuration, with ``changed`` fields, and reports of its forward main kernel or gradient kernels.

    Raises offline.ToolMissing and ValueError.
    """
    rung, precision = RUNGS.get(name) or GRADIENTS[name], bench.peak_name(dtype, precision)
    config = changed(rung.config_on(device, problem, dtype, precision), changes or {})
    steps = rung.steps(config, problem, device)
    shown = [step for step in steps if step.name == "main"] if name in RUNGS else steps
    return config, [offline.report(step.kernel, device.cc, step.shared_bytes) for step in shown]


def change(text: str) -> tuple[str, object]:
    """Field and value of "FIELD=VALUE". Raises ValueError."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{text!r} is not FIELD=VALUE, as in stages=4") from error


def changed(config, changes: dict):
    """``config`` with other values of its or its tile's fields. Raises ValueError for other names and types."""
    for name, value in changes.items():
        owner = config if name in _fields(config) else getattr(config, "tile", None)
        if name not in _fields(owner):
            known = ", ".join([*_fields(config), *_fields(getattr(config, "tile", None))])
            raise ValueError(f"the configuration has no field {name!r}; it has {known or 'none that can be set'}")
        present = getattr(owner, name)
        if type(value) is not type(present):
            raise ValueError(f"{name} must be of the type of {present!r}, got {value!r}")
        if type(value) is int and value < min(present, 1):
            raise ValueError(f"{name} must be at least {min(present, 1)}, got {value}")
        owner = replace(owner, **{name: value})
        config = owner if name in _fields(config) else replace(config, tile=owner)
    return config


def _fields(config) -> list[str]:
    plain = bool, int, float, str, tuple
    if not is_dataclass(config):
        return []
    return [field.name for field in fields(config) if isinstance(getattr(config, field.name), plain)]


def print_rung(
    name: str, workload: Workload, dtype: torch.dtype, precision: str, device: Device, changes: dict | None = None
) -> None:
    config, reports = compiled(name, workload.problem, dtype, precision, device, changes)
    print(f"\n{name} for {workload.name} {workload.problem} in {bench.peak_name(dtype, precision)}, {config}")
    if changes:
        print("not the configuration that the rung takes: no row is of it")
    if name in RUNGS and (predicted := RUNGS[name].predicted_ms(workload.problem, config, device)):
        print(f"predicted: {predicted:.3g} ms, without the launch")
    for report in reports:
        print(f"\nkernel {report.name}:\n" if len(reports) > 1 else "")
        print_report(report)


def print_report(report: offline.Report) -> None:
    print(table.markdown(REPORT_HEADER, [report_cells(report)]))
    if not report.blocks_per_multiprocessor:
        print("\nno multiprocessor takes such a block: the launch fails")
    total = report.instruction_mix.total()
    if total:
        common = report.instruction_mix.most_common(MOST_COMMON)
        print(f"\n{total} instructions, most often:\n")
        print(table.markdown(["instruction", "times", "share"], [(i, n, f"{n / total:.0%}") for i, n in common]))
    else:
        print("\nnvdisasm is missing, so instructions are not shown: pip install nvidia-cuda-nvdisasm")


def sm(cc: tuple) -> str:
    return "sm_" + "".join(map(str, cc))


def report_cells(report: offline.Report) -> list:
    memory = report.spill_bytes, report.local_bytes, report.shared_bytes
    return [sm(report.cc), report.threads, report.registers, *memory, f"{report.occupancy:.0%}"]
