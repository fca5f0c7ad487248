"""Interrupted compilation, and compilation in a forked process: nothing half done is left."""

import gc
import multiprocessing
import re
import signal
import sys
import threading
import time

import pytest
import torch

import numba_tconv
from numba_tconv.kernels import k2_polyphase
from numba_tconv.runtime import kernel as launch
from numba_tconv.selection.registry import RUNGS
from tests.parity import SMALL, operands, parameters
from tests.thorough import thorough

CC = (9, 0, "a")
PROBLEM = SMALL["groups, unequal channels"]
ATTEMPTS = 10  # an interrupt while Python calls a destructor is lost


def new_kernel():
    """k2's kernel, which nobody has compiled."""
    return k2_polyphase.make_kernel.__wrapped__(RUNGS["k2_polyphase"].config(PROBLEM, torch.float32))


def uncounted(ptx):
    """PTX whose names lack what Numba counts compilations with."""
    return re.sub(r"B\d+v\d+", "", ptx)


@pytest.fixture(scope="module")
def whole():
    """The PTX of an uninterrupted compilation, and its processor seconds."""
    new_kernel().ptx(CC)  # what the first one of a process does besides
    before = time.process_time()
    return uncounted(new_kernel().ptx(CC)), time.process_time() - before


@pytest.fixture
def interrupt_after():
    """A function that raises KeyboardInterrupt after so many processor seconds, in whatever then runs."""

    def interrupt(*_):
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGPROF, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, handler)


@pytest.mark.parametrize("part", thorough([0.1, 0.25, 0.4, 0.55, 0.7], always=[0.25, 0.55]))
def test_an_interrupt_leaves_nothing_half_done(whole, interrupt_after, tmp_path, monkeypatch, part):
    monkeypatch.setenv("NUMBA_TCONV_CACHE", str(tmp_path / "kernels"))
    (ptx, seconds), dispatcher = whole, sys.modules[launch.Dispatcher.__module__]
    find_device = dispatcher.get_current_device
    for _ in range(ATTEMPTS):
        kernel, before = new_kernel(), time.process_time()
        try:
            interrupt_after(part * seconds)
            kernel.ptx(CC)
            seconds = time.process_time() - before  # the processor may be faster by now
        except KeyboardInterrupt:
            break
        finally:
            interrupt_after(0)
    else:
        pytest.fail("it was never interrupted")
    assert gc.isenabled()
    assert dispatcher.get_current_device is find_device
    assert uncounted(kernel.kept_ptx(CC)) == ptx
    (kept,) = (tmp_path / "kernels").iterdir()
    assert kept.suffix == ".ptx"


def test_an_interrupt_waits_for_the_compiler(interrupt_after, monkeypatch):
    """Numba might not take up again what is interrupted."""
    ended = []

    def compile_ptx(*_, **__):
        begun = time.process_time()
        interrupt_after(0.01)
        while time.process_time() - begun < 0.1:
            pass
        ended.append(True)
        return "ptx", None

    monkeypatch.setattr(launch.cuda, "compile_ptx", compile_ptx)
    with pytest.raises(KeyboardInterrupt):
        new_kernel().ptx(CC)
    assert ended


def test_an_interrupt_while_a_thread_starts_leaves_no_compiler_alone(monkeypatch):
    begun, ended, start = [], [], threading.Thread.start

    def compile_ptx(*_, **__):
        begun.append(True)
        time.sleep(0.3)
        ended.append(True)
        return "ptx", None

    def interrupted(thread):
        start(thread)
        time.sleep(0.1)  # in which it may take up its work
        raise KeyboardInterrupt

    monkeypatch.setattr(launch.cuda, "compile_ptx", compile_ptx)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        new_kernel().ptx(CC)
    assert begun == ended


def in_a_fork(answers):
    x, w, bias = operands(PROBLEM, torch.float32)
    y = numba_tconv.conv_transpose1d(x, w, bias, **parameters(PROBLEM))
    theirs = torch.conv_transpose1d(x, w, bias, **parameters(PROBLEM))
    answers.put((uncounted(new_kernel().ptx(CC)), torch.equal(y, theirs)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork where there are threads
def test_a_fork_compiles_what_its_parent_compiled(whole):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=in_a_fork, args=(answers,))
    process.start()
    try:
        assert answers.get(timeout=120) == (whole[0], True)
    finally:
        process.join(10)
        process.kill()
