"""Every kernel under compute-sanitizer, on the problems of sanitized.py: no invalid access, no race in shared memory,
no misused barrier, no read of unwritten memory.

What the tools see depends on their version: the CUDA toolkit's or, newer, the package nvidia-cuda-sanitizer-api's. By
their release notes, memcheck checks loads through tensor maps from 2026.2 on, initcheck bulk copies from 2025.4 on.
CUDA 13.0's version has false findings in zero-filling cp.async, published tensor maps, arrivals of copies at mbarriers,
and bulk copies. So older versions check k6, k5_dmma and their uses on planes by memcheck alone, and the gradients by
wgmma by all tools but initcheck. In racecheck, loads through tensor maps belong to no thread, so their races go unseen.
"""

import fcntl
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from numba_tconv.lab.machine_code import offline
from numba_tconv.lab.measure import search
from numba_tconv.runtime.device import current_device
from numba_tconv.runtime.kernel import target
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS
from numba_tconv.torch_api import compile_ahead
from tests.conftest import GPU_TEST_LIMIT

from .sanitized import ACTIVATION, STEP, Forward, as_if_large, cases

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
FOUND = 86  # exit code of a sanitizer with findings
NO_FALSE_FINDINGS = (2026, 4)  # the first such version
REPORT_LINES = 60

# torch and runtime/kernel.py raise unexpected errors of CUDA calls; bindings also ask for what an older driver lacks.
# Padding makes an access beyond an allocation's end visible. k6 makes its mbarriers in a loop, of which the tools may
# count too few.
OPTIONS = {
    "memcheck": ("--report-api-errors", "no", "--padding", "1024"),
    "racecheck": ("--num-cuda-barriers", "64"),
    "synccheck": ("--num-cuda-barriers", "64"),
    "initcheck": (),
}
GROUPS = {
    "cuda_cores": [name for name in RUNGS if name not in ("k5_dmma", "k5_mma", "k6_wgmma")],
    STEP: [STEP],
    ACTIVATION: [ACTIVATION],
    "k5_dmma": ["k5_dmma"],
    "k5_mma": ["k5_mma"],
    "k6_wgmma": ["k6_wgmma"],
    "grad_input_planes": ["grad_input_planes"],  # by k5 and k6
    "grad_input_wgmma": ["grad_input_wgmma"],
    "grad_weight_wgmma": ["grad_weight_wgmma"],
}
GROUPS["gradients"] = [name for name in GRADIENTS if name not in GROUPS]
RINGS, PUBLISH = ("k5_dmma", "k6_wgmma", "grad_input_planes"), ("grad_input_wgmma", "grad_weight_wgmma")
FALSE_FINDINGS = {
    "memcheck": (),
    "racecheck": RINGS,
    "synccheck": RINGS,
    "initcheck": RINGS + PUBLISH,
}  # older versions


@pytest.fixture(scope="session")
def sanitizer():
    """The program; its newest version comes as a package."""
    usual = Path("/usr/local/cuda/bin/compute-sanitizer")
    found = offline.tool("compute-sanitizer", optional=True) or (str(usual) if usual.exists() else None)
    if found is None:
        pytest.skip("compute-sanitizer is not installed")
    return found


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Run everything without a sanitizer, to fill this package's and the driver's caches on disk."""
    # pytest-xdist's first process compiles; the others wait.
    folder = tmp_path_factory.getbasetemp()
    with Path(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder, "sanitized").open("a+") as done:
        fcntl.flock(done, fcntl.LOCK_EX)
        done.seek(0)
        if done.read():
            return
        with as_if_large():
            here = current_device()
            rungs = [name for name, rung in (RUNGS | GRADIENTS).items() if rung.runs_on(here) is None]
            # The run itself compiles the quicker tiny tiles and gradients.
            named = [case for case in cases() if isinstance(case, Forward) and case.rung in rungs]
            forward = [case for case in named if not case.config]
            configs = dict.fromkeys(case.config for case in named if case.rung == search.RUNG)
        calls = [compile_ahead.Call(case.rung, case.problem, case.dtype, case.precision, here) for case in forward]
        compile_ahead.fill(calls, target(here.cc), os.cpu_count())
        if configs:
            search.compile_all(list(configs), os.cpu_count())
        rungs += [STEP, ACTIVATION]
        with ThreadPoolExecutor() as pool:
            for rung, (code, output) in zip(rungs, pool.map(lambda rung: run(command(rung), 500), rungs), strict=True):
                assert code == 0, f"{rung}, without a sanitizer:\n{output}"
        done.write("done")


def command(*rungs):
    return [sys.executable, "-m", "tests.gpu.sanitized", *rungs]


def run(arguments, timeout):
    """Exit code and output. A program that hangs is ended with all that it started."""
    process = subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\nended after {timeout} seconds"
    return process.returncode, output


def version(sanitizer):
    found = re.search(r"Version (\d+)\.(\d+)", run([sanitizer, "--version"], 60)[1])
    return tuple(map(int, found.groups()))


def clean(tool, output):
    """Whether the report is clean and not called unreliable."""
    summary = r"RACECHECK SUMMARY: 0 hazards" if tool == "racecheck" else r"ERROR SUMMARY: 0 errors"
    return re.search(summary, output) is not None and "Results might be incorrect" not in output


def excerpt(output):
    """The report's first lines, and the last."""
    lines = output.splitlines()
    report = [line for line in lines if line.startswith("=====")]
    return "\n".join([*report[:REPORT_LINES], "...", *lines[-15:]])


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tool", OPTIONS)
def test_clean(tool, group, sanitizer, compiled, watchdog):
    if (rung := (RUNGS | GRADIENTS).get(group)) and (reason := rung.runs_on(current_device())):
        pytest.skip(f"{group}: {reason}")
    if group in FALSE_FINDINGS[tool] and version(sanitizer) < NO_FALSE_FINDINGS:
        pytest.skip("{} of {} needs compute-sanitizer {}.{} or above".format(tool, group, *NO_FALSE_FINDINGS))
    watchdog()
    # A busy machine may start the program late.
    options = ["--error-exitcode", str(FOUND), "--launch-timeout", "120", "--max-connections", "100", *OPTIONS[tool]]
    code, output = run([sanitizer, "--tool", tool, *options, *command(*GROUPS[group])], GPU_TEST_LIMIT - 20)
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer cannot look into this GPU, perhaps because the machine is virtual")
    if code or not clean(tool, output):
        pytest.fail(f"{tool}, exit code {code}:\n{excerpt(output)}", pytrace=False)
