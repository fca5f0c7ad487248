"""The output of `inspect`: a rung's configuration and compiled kernels."""

from __future__ import annotations

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import bench
from numba_tconv.lab.measure.workloads import Workload
from numba_tconv.lab.report import tables as table
from numba_tconv.runtime.device import H200, Device
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS

from . import offline

MOST_COMMON = 12  # instructions listed
REPORT_HEADER = ["compiled for", "threads", "registers", "spilled B", "local B", "shared B", "occupancy"]


def compiled(name: str, problem: Problem, dtype: torch.dtype, precision: str, device: Device = H200) -> tuple:
    """A rung's configuration for a problem, and reports of its kernels: all of a gradient's, or the forward kernel that
    multiplies. Raises offline.ToolMissing."""
    precision = bench.peak_name(dtype, precision)
    if name in RUNGS:
        rung = RUNGS[name]
        config = rung.config_on(device, problem, dtype, precision)
        kernels = [(rung.kernel(config), rung.shared_bytes(problem, config))]
    else:
        rung = GRADIENTS[name]
        config = rung.config(problem, dtype, device=device, precision=precision)
        kernels = rung.kernels(config)
    return config, [offline.report(kernel, device.cc, shared_bytes) for kernel, shared_bytes in kernels]


def print_rung(name: str, workload: Workload, dtype: torch.dtype, precision: str, device: Device) -> None:
    config, reports = compiled(name, workload.problem, dtype, precision, device)
    print(f"\n{name} for {workload.name} {workload.problem}, {config}")
    for report in reports:
        print(f"\nkernel {report.name}:\n" if len(reports) > 1 else "")
        print_report(report)


def print_report(report: offline.Report) -> None:
    print(table.markdown(REPORT_HEADER, [report_cells(report)]))
    total = report.instruction_mix.total()
    if total:
        common = report.instruction_mix.most_common(MOST_COMMON)
        print(f"\n{total} instructions, most often:\n")
        print(table.markdown(["instruction", "times", "share"], [(i, n, f"{n / total:.0%}") for i, n in common]))
    else:
        print("\nnvdisasm is missing, so instructions are not shown: pip install nvidia-cuda-nvdisasm")


def sm(cc: tuple) -> str:
    """An architecture's name: "sm_90a"."""
    return "sm_" + "".join(map(str, cc))


def report_cells(report: offline.Report) -> list:
    memory = report.spill_bytes, report.local_bytes, report.shared_bytes
    return [sm(report.cc), report.threads, report.registers, *memory, f"{report.occupancy:.0%}"]
