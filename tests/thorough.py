"""Cases that `make test` leaves to `make test-all`: further configurations of kernels.

A few tests that compile long are marked themselves.
"""

import pytest


def thorough(every, always):
    """The cases of a test, for ``parametrize``; all but ``always`` are for `make test-all`. A tuple holds the values of
    several arguments."""
    every = list(every)
    assert set(always) <= set(every), "a case that always runs must be one"
    assert len(always) < len(every), "otherwise nothing is left out"
    return [case if case in always else _marked(case) for case in every]


def _marked(case):
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.thorough)
