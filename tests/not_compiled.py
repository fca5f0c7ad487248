"""A fixture (``pytest_plugins``) for compilation ahead: the compiler records kernels and stays idle."""

from types import SimpleNamespace

import pytest

from numba_tconv.torch_api import compile_ahead


@pytest.fixture
def filled(monkeypatch):
    """The kernels given to the compiler, which reports three compiled and five found."""
    seen = SimpleNamespace(calls=[], cc=None, jobs=None)

    def fill(calls, cc, jobs):
        seen.calls, seen.cc, seen.jobs = calls, cc, jobs
        return 3, 5

    monkeypatch.setattr(compile_ahead, "fill", fill)
    return seen
