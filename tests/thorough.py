"""Cases that `make test` leaves to `make test-all`: further configurations of kernels.

A few tests that compile long are marked themselves.
"""

import hypothesis
import pytest


def thorough(every, always, *, tuples=False):
    """The cases of a test, for ``parametrize``; all but ``always`` are for `make test-all`. A tuple holds the values of
    several arguments, or with ``tuples`` the value of one."""
    every = list(every)
    assert set(always) <= set(every), "a case that always runs must be one"
    assert len(always) < len(every), "otherwise nothing is left out"
    return [case if case in always else _marked(case, tuples) for case in every]


def at_most(examples):
    """Settings of a property whose random examples are slow: the profile's number of them, at most ``examples``."""
    return hypothesis.settings(max_examples=min(examples, hypothesis.settings.default.max_examples))


def _marked(case, tuples):
    values = case if isinstance(case, tuple) and not tuples else (case,)
    return pytest.param(*values, marks=pytest.mark.thorough)
