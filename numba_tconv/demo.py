"""The demonstration: kernels checked, inspected and measured, as far as this machine allows, and the figures drawn."""

from __future__ import annotations

import torch

from . import bench, check, commands, inspection, named, offline, rows, table, workloads
from .kernels import RUNGS
from .progress import progress
from .ptx import SIMULATOR

LIVE_WORKLOAD = "kb64"
FIGURE = f"throughput_{LIVE_WORKLOAD}_total_float32_ieee"
LIVE_LENGTHS = (2**10, 2**13, 2**16, 2**19)
LIVE_REPEATS, LIVE_BUDGET_S = 10, 0.2
SHOWN_PRECISIONS = ("ieee", "tf32")


def run_demo(arguments) -> int:
    """With a GPU: check and a short sweep on it. Without: the simulator and the compiler. Then the recorded results."""
    live = torch.cuda.is_available() and not SIMULATOR
    heading("The rungs, checked" + ("" if live else " (no GPU: in the CUDA simulator, on small problems)"))
    code = check_live() if live else commands.in_simulator(["check", "--small"])
    heading("The rungs, compiled for compute capability 9.0")
    print_compiled()
    heading("Recorded results")
    recorded = rows.read_all(arguments.data)
    print(table.render(recorded))
    fresh = []
    if live:
        heading(f"{LIVE_WORKLOAD} against length, on this GPU")
        fresh, wrong = sweep()
        code = code or wrong
        print_sweep(fresh)
    heading("Figures")
    paths = commands.draw(recorded, arguments.data, arguments.plots / "live" if live else arguments.plots, fresh)
    if shown := [path for path in paths if path.name.startswith(FIGURE) and path.suffix == ".png"]:
        print(f"\nThe speed of {LIVE_WORKLOAD} against its length is in {shown[0]}")
    return code


def check_live() -> int:
    """Parity of the small problems and of one at full size, on the GPU; the exit code."""
    problems = (*check.SMALL, workloads.get(LIVE_WORKLOAD).problem)
    found = [commands.check_one(p, torch.float32, precision) for precision in SHOWN_PRECISIONS for p in problems]
    return 0 if all(outcome.right for one in found for _, outcome in one) else commands.FAILED


def heading(text: str) -> None:
    print(f"\n{text}\n{'=' * len(text)}\n", flush=True)


def print_compiled() -> None:
    """What ptxas says of each rung's kernel for LIVE_WORKLOAD, a line a precision. Where tools are missing, which."""
    problem, lines = workloads.get(LIVE_WORKLOAD).problem, []
    cases = [(rung, precision) for precision in SHOWN_PRECISIONS for rung in RUNGS.values()]
    for rung, precision in progress(cases, "compile"):
        if rung.supports(problem, torch.float32, precision) is None:
            try:
                _, (report,) = inspection.compiled(rung.name, problem, torch.float32, precision)
            except offline.ToolMissing as error:
                print(f"not compiled: {error}")
                return
            lines.append([rung.name, precision, *inspection.report_cells(report)])
    print(table.markdown(["rung", "precision", *inspection.REPORT_HEADER], lines))


def sweep() -> tuple[list[rows.Row], int]:
    """Rows of a short sweep on this GPU, and the exit code."""
    fresh, code = [], 0
    for length in LIVE_LENGTHS:
        workload = workloads.at_length(workloads.get(LIVE_WORKLOAD), length)
        names, _ = named.rungs_for(["all"], workload.problem, torch.float32, "ieee")
        try:
            measured = bench.measure(workload, names, repeats=LIVE_REPEATS, budget_s=LIVE_BUDGET_S)
        except bench.WrongResult as error:
            print(error)
            measured, code = error.rows, commands.FAILED
        fresh += measured
    return fresh, code


def print_sweep(fresh: list[rows.Row]) -> None:
    """Milliseconds of each contestant at each length; cuDNN's and conv1d's are those of the run of that length."""
    names = [name for name in (*RUNGS, bench.AUTO) if any(row.rung == name for row in fresh)]
    lines = []
    for length in LIVE_LENGTHS:
        of_length = {row.rung: row for row in fresh if row.length == length}
        times = [of_length[name].ms_p50 if name in of_length else None for name in names]
        one = next(iter(of_length.values()), None)
        times += [one.cudnn_ms_p50, one.conv1d_ms_p50, one.floor_ms] if one else [None] * 3
        lines.append([length, *("-" if ms is None else f"{ms:.3g}" for ms in times)])
    print("\nMilliseconds (median), the batch times the length always the same:\n")
    print(table.markdown(["length", *names, "cuDNN", "conv1d", "floor"], lines))
