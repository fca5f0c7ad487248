"""Stand-ins for measuring and compiling."""

import pytest
import torch

from numba_tconv.lab.cli import sweep_run
from numba_tconv.lab.measure import ahead, bench
from numba_tconv.lab.measure import contestants as named
from numba_tconv.runtime.device import H200
from tests.samples import row


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
    """Nothing is compiled ahead; returns the calls that would be."""
    seen = []
    monkeypatch.setattr(ahead, "compile_all", seen.extend)
    monkeypatch.setattr(sweep_run, "current_device", lambda: H200)
    return seen
