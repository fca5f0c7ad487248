"""Processes that work for a program run its functions, never the program itself."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from numba_tconv.runtime import workers

ROOT = Path(__file__).resolve().parents[2]


def write(folder, name):
    print("no answer")
    Path(folder, name).write_text(str(os.getpid()))


def refuse(folder, name):
    raise ValueError(f"not {name}")


class Unusual(Exception):
    """Which no other process can be told."""

    def __init__(self, one, other):
        super().__init__(one + other)


def die(folder, name):
    os._exit(7)


def linger(folder, name):
    Path(folder, f"{name}.begun").write_text("")
    time.sleep(1)
    Path(folder, name).write_text("")


def tasks(folder, count):
    return [(str(folder), f"{number}") for number in range(count)]


@pytest.mark.parametrize(("count", "jobs"), [(3, 1), (1, 3)])
def test_a_single_process_is_this_one(tmp_path, monkeypatch, count, jobs):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    workers.run(write, tasks(tmp_path, count), jobs, "writing")
    assert [path.read_text() for path in tmp_path.iterdir()] == [str(os.getpid())] * count
    workers.run(write, [], jobs, "writing")


def test_an_exception_that_another_process_cannot_be_told_is_told_in_words():
    told = [pickle.loads(workers._pickled(one)) for one in (None, ValueError("not 1"), Unusual("not ", "0"))]
    assert [repr(one) for one in told] == ["None", "ValueError('not 1')", "RuntimeError('Unusual: not 0')"]


@pytest.mark.thorough
def test_what_a_call_raises_is_raised(tmp_path):
    with pytest.raises(ValueError, match=r"not [01]"):
        workers.run(refuse, tasks(tmp_path, 2), 2, "refusing")
    with pytest.raises(RuntimeError, match="a process ended before its work did, with exit code 7"):
        workers.run(die, tasks(tmp_path, 6), 2, "dying")


def test_a_plain_script_is_not_run_again(tmp_path):
    """One without `if __name__ == "__main__":`, in a folder whose modules are named like the library's."""
    (tmp_path / "signal.py").write_text("raise SystemExit('of the library is meant')")
    script = tmp_path / "folder" / "script.py"
    script.parent.mkdir()
    script.write_text(
        "import sys\nfrom numba_tconv.runtime import workers\nfrom tests.runtime import test_workers\nprint('once')\n"
        f"workers.run(test_workers.write, test_workers.tasks({str(tmp_path)!r}, 5), 2, 'writing')\n"
        f"test_workers.write({str(tmp_path)!r}, 'own')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert (done.returncode, done.stdout) == (0, "once\nno answer\n"), done.stderr
    *pids, own = [(tmp_path / name).read_text() for name in ("0", "1", "2", "3", "4", "own")]
    assert own not in pids
    assert len(set(pids)) <= 2


def test_processes_ignore_interrupts(tmp_path):
    (tmp_path / "told.py").write_text("import signal\ndef serve(): print(signal.getsignal(signal.SIGINT).name)\n")
    command = workers.COMMAND.format(path=[str(tmp_path), *sys.path], module="told")
    assert subprocess.run([sys.executable, "-c", command], capture_output=True, text=True).stdout == "SIG_IGN\n"


@pytest.mark.thorough
def test_an_interrupt_lets_calls_end_and_starts_no_more(tmp_path):
    """Ctrl-C for the whole group of processes."""
    script = (
        "from numba_tconv.runtime import workers\nfrom tests.runtime import test_workers\n"
        f"workers.run(test_workers.linger, test_workers.tasks({str(tmp_path)!r}, 20), 2, 'lingering')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        alarm = threading.Timer(280, process.kill)
        alarm.start()
        while process.poll() is None and len([*tmp_path.glob("*.begun")]) < 2:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        said = process.stderr.read()
        alarm.cancel()
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert said.count("Traceback") == 1, said
    begun = {path.stem for path in tmp_path.glob("*.begun")}
    assert begun == {path.name for path in tmp_path.iterdir() if not path.suffix}
    assert 2 <= len(begun) < 20
