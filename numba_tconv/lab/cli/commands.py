"""The commands; parser.py has their arguments."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.explain.explain import explain
from numba_tconv.lab.machine_code import inspection
from numba_tconv.lab.measure import bench, check, rows, search, workloads
from numba_tconv.lab.measure import contestants as named
from numba_tconv.lab.measure.workloads import Workload
from numba_tconv.lab.report import tables as table
from numba_tconv.lab.studies import decoder_modes
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.device import GPUS, current_device
from numba_tconv.runtime.progress import progress
from numba_tconv.selection.directions import FORWARD, RESULTS, rung_direction, rungs_of
from numba_tconv.selection.registry import RUNGS

from . import info

FAILED, MISTAKE = 1, 2  # exit codes: a wrong result; a command that cannot run
PROBLEM_FIELDS = [field.name for field in dataclasses.fields(Problem)]
NEEDED = ("in_channels", "out_channels", "kernel_size", "length")
README = Path("README.md")
WORKLOADS_HEADER = ["name", "model", "layer", "batch", "channels", "length", "taps", "stride", "besides"]
ONE_ELEMENT = Problem(1, 1, 1, 1, 1)
DISTURBED = 1.25  # of p80 to p20, which idle machines seldom have
DEVICES = {".".join(map(str, gpu.cc)): gpu for gpu in GPUS.values()}


class Mistake(Exception):
    """The command cannot be carried out."""


@contextlib.contextmanager
def mistakes() -> Iterator[None]:
    """Turn errors of reading input into Mistake."""
    try:
        yield
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise Mistake(str(error)) from error


def require_compiler() -> None:
    if SIMULATOR:
        raise Mistake("the simulator compiles nothing: unset NUMBA_ENABLE_CUDASIM")


def require_gpu() -> None:
    if SIMULATOR:
        raise Mistake("this needs a GPU, and NUMBA_ENABLE_CUDASIM asks for the simulator: unset it")
    if not torch.cuda.is_available():
        raise Mistake("this needs a CUDA GPU that torch sees; `python -m numba_tconv info` says what is missing")


def checked_precision(dtypes: list[str], precision: str | None) -> str | None:
    if precision and not any(precision in PRECISIONS[bench.DTYPES[dtype]] for dtype in dtypes):
        raise Mistake(f"{', '.join(dtypes)} has no precision {precision!r}: --precision is of float32 products")
    return precision


def named_precision(arguments) -> str:
    return checked_precision([arguments.dtype], arguments.precision) or "ieee"


def run_bench(arguments) -> int:
    with mistakes():
        chosen = workloads.expand(arguments.workloads, arguments.batch)
    return record(chosen, arguments)


def record(chosen: list[Workload], arguments) -> int:
    dtype, names = bench.DTYPES[arguments.dtype], arguments.rung or ["all"]
    arithmetic = dtype, named_precision(arguments)
    with mistakes():
        bench.check_weights(arguments.weights, arguments.direction)
        plans = [plan(names, workload.problem, *arithmetic, arguments.direction, len(chosen)) for workload in chosen]
        if not any(rungs for rungs, _ in plans):
            raise ValueError(f"none of the workloads can be done: {plans[0][1][0]}")
    require_gpu()
    rows.check_writable(arguments.out)
    wrong = []
    for workload, (rungs, left_out) in zip(chosen, plans, strict=True):
        for line in left_out:
            print(f"left out: {line}")
        if rungs:
            record_one(workload, rungs, arguments, wrong)
            torch.cuda.empty_cache()
    print(f"rows added to {arguments.out}")
    return FAILED if wrong else 0


def record_one(workload: Workload, rungs: list[str], arguments, wrong: list[str]) -> list[rows.Row]:
    """Add rows to --out and print them; append errors to ``wrong``."""
    arithmetic = bench.DTYPES[arguments.dtype], named_precision(arguments)
    how = dict(weights=arguments.weights, repeats=arguments.repeats, budget_s=arguments.budget)
    try:
        measured = bench.measure(workload, rungs, *arithmetic, arguments.direction, **how)
    except bench.WrongResult as error:
        measured = error.rows
        wrong.append(str(error))
        print(f"numba_tconv: {error}", file=sys.stderr)
    rows.append(arguments.out, measured)
    for row in measured:
        print(describe(row), flush=True)
    return measured


def plan(names: list[str], problem: Problem, dtype: torch.dtype, precision: str, direction: str, workloads: int):
    """``rungs_for``; among several ``workloads`` it skips named rungs that cannot do one."""
    if workloads == 1:
        return named.rungs_for(names, problem, dtype, precision, direction=direction)
    chosen, left_out = [], []
    for name in names:
        try:
            able, unable = named.rungs_for([name], problem, dtype, precision, direction=direction)
        except NotImplementedError as error:
            able, unable = [], [str(error)]
        chosen, left_out = chosen + able, left_out + unable
    return list(dict.fromkeys(chosen)), left_out


def describe(row: rows.Row) -> str:
    share = "" if row.roofline is None else f", {row.roofline:.0%} of roofline"
    conv1d = "-" if row.conv1d_ms_p50 is None else f"{row.conv1d_ms_p50:.4g}"
    direction = "" if row.direction == FORWARD else f"{row.direction} "
    frozen = " frozen" if row.weights == rows.FROZEN else ""
    disturbed = row.ms_p80 > DISTURBED * row.ms_p20
    spread = f"; disturbed: calls took {row.ms_p20:.4g} to {row.ms_p80:.4g} ms, measure again" if disturbed else ""
    return (
        f"{row.workload} L {row.length} {direction}{row.dtype} {row.precision} {row.rung}{frozen}: {row.ms_p50:.4g} ms"
        f" (cuDNN {row.cudnn_ms_p50:.4g}, conv1d {conv1d}), {row.gbps:.0f} GB/s, {row.tflops:.1f} TFLOP/s{share},"
        f" error {row.relerr:.2e} (cuDNN {row.cudnn_relerr:.2e}){spread}"
    )


def run_check(arguments) -> int:
    precision = named_precision(arguments)
    with mistakes():
        problems = check.SMALL if arguments.small else [problem_of(arguments, check.SMALL[0])]
        for problem in problems:
            check.require_checkable(problem)
        if SIMULATOR or not torch.cuda.is_available():
            for problem in problems:
                check.require_simulable(problem)
    if not torch.cuda.is_available() and not SIMULATOR:
        return in_simulator(arguments.argv)
    right, dtype = True, bench.DTYPES[arguments.dtype]
    for problem in problems:
        found = check_one(problem, dtype, precision)
        right &= all(outcome.right for _, outcome in found)
        if not any(of == FORWARD and outcome.name in RUNGS and outcome.error for of, outcome in found):
            raise Mistake(f"no rung computes {problem} in {bench.peak_name(dtype, precision)} {check.where()}")
    return 0 if right else FAILED


def check_one(problem: Problem, dtype: torch.dtype, precision: str) -> list[tuple[str, check.Outcome]]:
    found = list(progress(check.parity(problem, dtype, precision), f"check {problem}", check.steps()))
    print(f"\n{problem}, {bench.peak_name(dtype, precision)}, {check.where()}; errors against float64")
    for result in RESULTS:
        cells = [outcome.cells() for of, outcome in found if of == result]
        print(f"\n{table.markdown([f'{result} by', 'norm', 'largest', ''], cells)}", flush=True)
    for _, outcome in found:
        if outcome.where:
            print(f"\n{outcome.name}: {outcome.where}")
    return found


def problem_of(arguments, base: Problem) -> Problem:
    """The named workload's problem, else ``base``, with given sizes."""
    base = workloads.get(arguments.workload).problem if arguments.workload else base
    return dataclasses.replace(base, **given_sizes(arguments))


def given_sizes(arguments) -> dict:
    return {name: value for name in PROBLEM_FIELDS if (value := getattr(arguments, name, None)) is not None}


def require_sizes(arguments, but: str = "") -> None:
    given = {*given_sizes(arguments), but}
    if needed := [name for name in PROBLEM_FIELDS if name in NEEDED and name not in given]:
        flags = ", ".join("--" + name.replace("_", "-") for name in needed)
        raise Mistake(f"name a workload, or give {flags} too")


def in_simulator(argv: list[str]) -> int:
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    return subprocess.run([sys.executable, "-m", "numba_tconv", *argv], env=environment).returncode


def run_explain(arguments) -> int:
    if not arguments.workload:
        require_sizes(arguments)
    with mistakes():
        problem = problem_of(arguments, ONE_ELEMENT)
        device = DEVICES[arguments.cc] if arguments.cc else None
        dtype = bench.DTYPES[arguments.dtype]
        choices = dict(dtype=dtype, precision=arguments.precision, variant=arguments.rung)
        print(explain(problem, device=device, data=arguments.data, **choices))
    return 0


def run_workloads(arguments) -> int:
    print(table.markdown(WORKLOADS_HEADER, map(workload_cells, workloads.WORKLOADS.values())))
    return 0


def workload_cells(workload: Workload) -> list:
    p = workload.problem
    defaults = dict(padding=0, output_padding=0, dilation=1)
    others = [f"{name} {value}" for name, default in defaults.items() if (value := getattr(p, name)) != default]
    others += [f"{p.groups} groups"] if p.groups > 1 else []
    sizes = p.batch, f"{p.in_channels} to {p.out_channels}", p.length, p.kernel_size, p.stride
    return [workload.name, workload.family, workload.note, *sizes, ", ".join(others)]


def run_figures(arguments) -> int:
    from numba_tconv.lab.report import figures, readme  # imports matplotlib

    data, plots = arguments.data, arguments.plots
    recorded = rows.read_all(data)
    if not recorded:
        raise Mistake(f"{_no_rows(data)}; nothing was written")
    front = arguments.readme or README
    if arguments.readme and not front.exists():
        raise Mistake(f"there is no {front} to put the tables in; nothing was written")
    tables, pages = readme.tables(data), {front: readme.FRONT, plots / "README.md": readme.RESULTS}
    for page, names in pages.items():
        if page.exists():
            readme.updated(page, {name: tables[name] for name in names})
            rows.check_replaceable(page)
    rows.check_replaceable(plots / "figure")
    timed = rows.existing(data / decoder_modes.FILE, decoder_modes.Timed)
    searched = rows.existing(data / search.FILE, search.Tried)
    changed = figures.draw_all(recorded, plots, searched=searched, timed=timed)
    for page, names in pages.items():
        if not page.exists():
            print(f"there is no {page} to put the tables in")
        elif readme.update(page, {name: tables[name] for name in names}):
            changed.append(page)
    for path in changed:
        print(path)
    print(f"{len(changed)} files changed")
    return 0


def _no_rows(data: Path) -> str:
    return f"{data} holds no rows: they are in a checkout of the repository (`bench` and `sweep` record more, on a GPU)"


def run_inspect(arguments) -> int:
    dtype, device = bench.DTYPES[arguments.dtype], DEVICES[arguments.cc]
    asked = checked_precision([arguments.dtype], arguments.precision)
    with mistakes():
        workload = workloads.get(arguments.workload)
        changes = dict(inspection.change(text) for text in arguments.set)
        directions = RESULTS if arguments.rung == "all" else [rung_direction(arguments.rung)]
        found = []
        for direction in directions:
            precision = asked or own_precision(arguments.rung, direction, workload.problem, dtype)
            names = named.rungs_for([arguments.rung], workload.problem, dtype, precision, device, direction)
            found.append((direction, precision, *names))
    require_compiler()
    for direction, precision, names, left_out in found:
        for line in left_out:
            print(f"left out: {line}")
        for name in names:
            if name in rungs_of(direction):
                try:
                    with mistakes():
                        inspection.print_rung(name, workload, dtype, precision, device, changes)
                except Exception as error:
                    if not changes or isinstance(error, Mistake):
                        raise
                    said = f"{type(error).__name__}: {error}"
                    raise Mistake(f"{name} cannot be made with {', '.join(arguments.set)}: {said}") from error
    return 0


def own_precision(name: str, direction: str, problem: Problem, dtype: torch.dtype) -> str:
    """The rung's first precision for the problem, else the dtype's."""
    precisions, rung = PRECISIONS[dtype], rungs_of(direction).get(name)
    able = (one for one in precisions if rung and rung.supports(problem, dtype, one) is None)
    return next(able, precisions[0]) if dtype == torch.float32 else "ieee"


def run_search(arguments) -> int:
    dtype = bench.DTYPES[arguments.dtype]
    asked = checked_precision([arguments.dtype], arguments.precision) or "tf32"
    precision = bench.peak_name(dtype, asked)
    with mistakes():
        chosen = workloads.expand(arguments.workloads)
    require_gpu()
    rows.check_writable(arguments.out, search.Tried)
    device, rung, wrong = current_device(), RUNGS[search.RUNG], False
    able = [w for w in chosen if rung.refusal(w.problem, dtype, precision, device) is None]
    if not able:
        raise Mistake(f"{search.RUNG} can do none of the workloads in {precision} on this GPU")
    search.compile_all([c for w in able for c in search.configs(w.problem, precision)], os.cpu_count() or 1)
    for workload in able:
        try:
            tried = search.measure(workload, dtype, asked)
        except bench.WrongResult as error:
            wrong = True
            print(f"numba_tconv: {error}", file=sys.stderr)
            continue
        search.append(arguments.out, tried)
        best, taken = (min(row.ms_p50 for row in some) for some in (tried, [row for row in tried if row.chosen]))
        print(f"{workload.name} {precision}: {len(tried)} configurations, the best {best:.4g} ms, taken {taken:.4g} ms",
              flush=True)  # fmt: skip
        torch.cuda.empty_cache()
    print(f"rows added to {arguments.out}")
    return FAILED if wrong else 0


def run_info(arguments) -> int:
    facts = info.facts()
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:<{width}}  {value}")
    for line in info.advice():
        print(f"- {line}")
    return 0
