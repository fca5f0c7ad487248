"""A helper of the tests of the command line."""

import pytest
import torch

from numba_tconv.lab.cli import parser as cli
from numba_tconv.lab.cli import sweep_run
from numba_tconv.lab.measure import bench
from numba_tconv.lab.measure import contestants as named
from numba_tconv.runtime.device import H200

from .samples import row

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so this is no mistake")


def run(capsys, *argv):
    """Exit code, stdout and stderr of a command line."""
    try:
        code = cli.main([*map(str, argv)])
    except SystemExit as left:  # argparse
        code = left.code
    return code, *capsys.readouterr()


@pytest.fixture
def measuring(monkeypatch):
    """Measurements return made-up rows, as if on a GPU; returns the workloads measured."""
    seen = []

    def measure(workload, rungs, dtype, precision, direction, *, weights, repeats, budget_s):
        seen.append(workload.name)
        return [row(workload, rung, direction=direction, weights=weights) for rung in rungs]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(named, "current_device", lambda: H200)
    monkeypatch.setattr(bench, "measure", measure)
    return seen


@pytest.fixture
def compiling(monkeypatch):
    """Nothing is compiled ahead; returns what would be, as problems and names."""
    seen = []
    monkeypatch.setattr(sweep_run, "compile_ahead_of", lambda problems, names, *_: seen.append((problems, names)))
    return seen
