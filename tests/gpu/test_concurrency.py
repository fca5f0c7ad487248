"""First calls from eight threads at once, and from forked and spawned processes.

Each test starts a fresh process, as first calls compile, load and keep.
"""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import numba_tconv
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import fuzz
from numba_tconv.lab.measure.directions import Operands
from numba_tconv.lab.measure.fuzz import bound
from numba_tconv.runtime.device import current_device
from numba_tconv.selection.directions import rung_direction, rungs_of
from numba_tconv.selection.registry import RUNGS
from tests.parity import SMALL, operands, parameters

from .common import ARITHMETIC, LARGE, in_float64

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
THREADS = 8
PROBLEM = LARGE["HiFi-GAN's third layer"]
LIMIT_S = 280  # below a test's limit (tests/conftest.py)


def in_a_process(name, *arguments, cache=""):
    """Call a function of this module in a new interpreter; ``cache``: the directory of compiled kernels."""
    program = f"from tests.gpu import test_concurrency; test_concurrency.{name}(*{arguments!r})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"NUMBA_TCONV_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def check(problem, dtype, variant, precision):
    x, w, bias = operands(problem, dtype, "cuda")
    choice = {"variant": variant, "precision": precision}
    y = numba_tconv.conv_transpose1d(x, w, bias, **parameters(problem), **choice)
    far = (y.double() - in_float64(x, w, bias, problem)).abs()
    assert (far <= bound("forward", (x, w, bias), problem, dtype, precision)).all(), choice
    return y


def arithmetic_of(name):
    gpu = current_device()
    return [pair for pair in ARITHMETIC if RUNGS[name].refusal(PROBLEM, *pair, gpu) is None]


def first_calls_in_threads(name):
    torch.backends.cudnn.allow_tf32 = False
    together, cases = threading.Barrier(THREADS), arithmetic_of(name)
    assert cases

    def work(_):
        outputs = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for dtype, precision in cases:
                together.wait(LIMIT_S)
                outputs.append(check(PROBLEM, dtype, name, precision).shape)
            torch.cuda.current_stream().synchronize()
        return outputs

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(work, range(THREADS)))
    assert all(len(outputs) == len(cases) for outputs in results)


# A process for each rung: all in one would take minutes beside others that compile.
@pytest.mark.parametrize("kept", [False, True], ids=["compiled in memory", "kept on disk"])
@pytest.mark.parametrize("rung", RUNGS)
def test_eight_threads_call_first_time_kernels_on_their_own_streams(tmp_path, rung, kept):
    if not arithmetic_of(rung):
        pytest.skip(f"{rung} cannot do the problem on this GPU")
    folder = tmp_path / "kernels"
    in_a_process("first_calls_in_threads", rung, cache=folder if kept else "")
    if kept:
        assert {path.suffix for path in folder.iterdir()} == {".ptx"}


def check_small():
    torch.backends.cudnn.allow_tf32 = False
    check(SMALL["groups, unequal channels"], torch.float32, "k2_polyphase", "ieee")


def fork_before_cuda():
    """The parent has imported everything and used no GPU."""
    assert not torch.cuda.is_initialized()
    child = os.fork()
    if not child:
        try:
            check_small()
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    check_small()


def fork_after_cuda():
    """A child cannot use its parent's GPU. torch says so, and so do we for inherited tensors."""
    problem = SMALL["groups, unequal channels"]
    x, w, bias = operands(problem, torch.float32, "cuda")
    torch.cuda.synchronize()
    child = os.fork()
    if not child:
        try:
            numba_tconv.conv_transpose1d(x, w, bias, **parameters(problem))
        except RuntimeError as error:
            os._exit(0 if "forked subprocess" in str(error) else 2)
        except BaseException:
            os._exit(3)
        os._exit(4)
    assert os.waitpid(child, 0)[1] == 0
    check_small()


def spawn_after_cuda():
    check_small()
    context = torch.multiprocessing.get_context("spawn")
    process = context.Process(target=check_small)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 0


@pytest.mark.parametrize("start", ["fork_before_cuda", "fork_after_cuda", "spawn_after_cuda"])
def test_processes(start):
    in_a_process(start)


@pytest.mark.parametrize("name", ["k6_wgmma", "grad_input_wgmma", "grad_weight_wgmma"])
def test_a_thread_may_begin_with_what_no_thread_has_called(name):
    """torch gives a thread the GPU's context at its first launch or allocation; this thread made none."""
    problem, direction = Problem(2, 64, 64, 4, 1111, stride=2), rung_direction(name)
    rung = rungs_of(direction)[name]
    if reason := rung.refusal(problem, torch.bfloat16, "bf16", current_device()):
        pytest.skip(reason)
    x, w, _ = operands(problem, torch.bfloat16, "cuda")
    grad_output = torch.randn(problem.out_shape, device="cuda").to(torch.bfloat16)
    result = torch.full(problem.shape_of(direction), torch.nan, device="cuda", dtype=torch.bfloat16)
    given = Operands(x, w, None, grad_output).of(direction)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(rung.run, *given, result, problem, precision="bf16").result(LIMIT_S)
    torch.cuda.synchronize()
    far = (result.double() - fuzz.in_float64(direction, given, problem)).abs()
    assert (far <= bound(direction, given, problem, torch.bfloat16, "bf16")).all()
