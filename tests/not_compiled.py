"""What the tests of compilation ahead share: kernels that are handed to the compiler, which stays idle.

A file takes the fixture by ``pytest_plugins``.
"""

from types import SimpleNamespace

import pytest

from numba_tconv.torch_api import compile_ahead


@pytest.fixture
def filled(monkeypatch):
    """What was handed to the compiler, which says that it compiled three kernels and found five."""
    seen = SimpleNamespace(calls=[], cc=None, jobs=None)

    def fill(calls, cc, jobs):
        seen.calls, seen.cc, seen.jobs = calls, cc, jobs
        return 3, 5

    monkeypatch.setattr(compile_ahead, "fill", fill)
    return seen
