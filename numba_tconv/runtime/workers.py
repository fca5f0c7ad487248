"""Work for several processors; multiprocessing would rerun a plain script in each."""

import contextlib
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

from .progress import progress

# Terminals interrupt all processes; only the parent reacts.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = {path}
from {module} import serve
serve()
"""


def run(function: Callable, tasks: list[tuple], jobs: int, label: str) -> None:
    """Call ``function(*task)`` for every task, in up to ``jobs`` processes; for one task or job in this one.

    Function and tasks are pickled, results dropped. After an exception or interrupt no call begins. Raises what a call
    raises, RuntimeError if a process ends early.
    """
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        for task in progress(tasks, label, len(tasks)):
            function(*task)
        return
    with contextlib.ExitStack() as stack:
        idle = deque(stack.enter_context(_process()) for _ in range(jobs))

        def call(task):
            process = idle.pop()
            try:
                _call(process, function, task)
            finally:
                idle.append(process)

        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(call, task) for task in tasks]
            try:
                for future in progress(as_completed(futures), label, len(futures)):
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def serve() -> None:
    """Call functions from stdin; answer each call's exception or None."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints are no answers
    while True:
        try:
            function, task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        raised = None
        try:
            function(*task)
        except Exception as error:
            raised = error
        answers.write(_pickled(raised))
        answers.flush()


@contextlib.contextmanager
def _process() -> Iterator[subprocess.Popen]:
    command = COMMAND.format(path=[place for place in sys.path if isinstance(place, str)], module=__name__)
    # -P: not the current directory
    with subprocess.Popen(
        [sys.executable, "-P", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.close()


def _call(process: subprocess.Popen, function: Callable, task: tuple) -> None:
    try:
        pickle.dump((function, task), process.stdin)
        process.stdin.flush()
        raised = pickle.load(process.stdout)
    except (EOFError, OSError) as error:
        raise RuntimeError(f"a process ended before its work did, with exit code {process.wait()}") from error
    if raised is not None:
        raise raised


def _pickled(error: Exception | None) -> bytes:
    try:
        text = pickle.dumps(error)
        pickle.loads(text)
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return text
