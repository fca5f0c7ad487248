"""``demo``: check, compile, time what the machine allows; show recorded results."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from numba_tconv.lab.machine_code import inspection, offline
from numba_tconv.lab.measure import bench, check, rows, workloads
from numba_tconv.lab.measure import contestants as named
from numba_tconv.lab.measure.sweep import BATCH
from numba_tconv.lab.report import summary
from numba_tconv.lab.report import tables as table
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.progress import progress
from numba_tconv.selection.registry import LADDER

from . import commands

LIVE_WORKLOAD = "kb64"
FIGURE = f"throughput_batch{BATCH}_float32_tf32.png"
LIVE_FIGURE = f"throughput_batch{BATCH}_float32_ieee.png"
LIVE_LENGTHS = (2**10, 2**13, 2**16, 2**19)
LIVE_REPEATS, LIVE_BUDGET_S = 10, 0.2
PRECISIONS = ("ieee", "tf32")  # a rung is compiled in its first


def run_demo(arguments) -> int:
    recorded = rows.read_all(arguments.data)
    if torch.cuda.is_available() and not SIMULATOR:
        code = checked_live()
        print(compiled())
        fresh, wrong = sweep()
        code = code or wrong
        print(swept(fresh))
        figure = arguments.plots / "live" / LIVE_FIGURE
        beside = [row for row in recorded if row.workload == fresh[0].workload] if fresh else []
        from numba_tconv.lab.report import figures

        figures.draw_all(beside, figure.parent, fresh)
    else:
        simulator = start_simulator()
        line = compiled()
        code = checked_in_simulator(simulator)
        print(line)
        figure = arguments.plots / FIGURE
    for line in results(recorded, arguments.data):
        print(line)
    if figure.exists():
        print(f"Throughput against signal length: {figure}")
    else:
        print(f"There is no {figure}: `make figures` draws it from the rows in {arguments.data}")
    return code


def results(recorded: list[rows.Row], data: Path) -> list[str]:
    lines, shown = summary.lines(recorded), summary.shown(recorded)
    if not lines:
        return [f"{data} holds no rows of these layers (`bench` records them, on a GPU)"]
    return [
        f"Recorded on {table.where(shown)}: milliseconds, and how many times as fast as torch",
        *(f"  {line}" for line in lines),
        *filter(None, [table.note(shown)]),
    ]


def start_simulator() -> subprocess.Popen:
    command = [sys.executable, "-m", "numba_tconv", "check", "--small"]
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def checked_in_simulator(simulator: subprocess.Popen) -> int:
    """Print one line, or all of a failed check; returns its exit code."""
    said, _ = simulator.communicate()
    if simulator.returncode:
        print(said)
    else:
        right = sum(line.endswith(" right |") for line in said.splitlines())
        print(f"Checked in the CUDA simulator on {len(check.SMALL)} small problems: {right} results, all right")
    return simulator.returncode


def checked_live() -> int:
    problems = (*check.SMALL, workloads.get(LIVE_WORKLOAD).problem)
    cases = [(problem, precision) for precision in PRECISIONS for problem in problems]
    found = [
        (problem, outcome)
        for problem, precision in progress(cases, "check")
        for _, outcome in check.parity(problem, torch.float32, precision)
        if outcome.error is not None
    ]
    wrong = [(problem, outcome) for problem, outcome in found if not outcome.right]
    for problem, outcome in wrong:
        print(f"WRONG: {outcome.name} on {problem}: {outcome.where or outcome.error}")
    print(f"Checked on {torch.cuda.get_device_name()} on {len(problems)} problems: {len(found)} results, "
          f"{f'{len(wrong)} wrong' if wrong else 'all right'}")  # fmt: skip
    return commands.FAILED if wrong else 0


def compiled() -> str:
    problem, reports = workloads.get(LIVE_WORKLOAD).problem, {}
    for rung in progress(LADDER, "compile"):
        precision = next(one for one in PRECISIONS if rung.supports(problem, torch.float32, one) is None)
        try:
            _, (reports[rung.name],) = inspection.compiled(rung.name, problem, torch.float32, precision)
        except offline.ToolMissing as error:
            return f"Not compiled: {error}"
    registers = ", ".join(f"{name.partition('_')[0]} {report.registers}" for name, report in reports.items())
    spilled = sum(report.spill_bytes for report in reports.values())
    return f"Compiled for compute capability 9.0: registers {registers}; {spilled} bytes spilled"


def sweep() -> tuple[list[rows.Row], int]:
    fresh, code = [], 0
    for length in LIVE_LENGTHS:
        workload = workloads.at_length(workloads.get(LIVE_WORKLOAD), length, BATCH)
        names, _ = named.rungs_for(["all"], workload.problem, torch.float32, "ieee")
        try:
            measured = bench.measure(workload, names, repeats=LIVE_REPEATS, budget_s=LIVE_BUDGET_S)
        except bench.WrongResult as error:
            print(error)
            measured, code = error.rows, commands.FAILED
        fresh += measured
    return fresh, code


def swept(fresh: list[rows.Row]) -> str:
    said = []
    for length in LIVE_LENGTHS:
        if of_length := [row for row in fresh if row.length == length and row.rung != bench.AUTO]:
            best = min(of_length, key=lambda row: row.ms_p50)
            said.append(f"{length}: {best.ms_p50:.3g} ms by {best.rung} (cuDNN {best.cudnn_ms_p50:.3g})")
    return f"{LIVE_WORKLOAD}'s channels in full precision, by length: {'; '.join(said) or 'nothing measured'}"
