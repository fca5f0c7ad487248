"""Fixtures for calls around the dispatcher: CPU tensors take a GPU's ways, which are recorded.

A file takes them by ``pytest_plugins``, and ``made_ready`` for all of its tests by ``pytestmark``.
"""

import functools

import pytest
import torch

import numba_tconv
from numba_tconv.torch_api import fast_path as direct
from numba_tconv.torch_api import functional
from numba_tconv.torch_api import gradient_operators as grad_ops
from numba_tconv.torch_api import operators as ops

from .parity import SMALL, operands, parameters

PROBLEM = SMALL["groups, unequal channels"]


READY = {"ready": ops._cpu, "ready_input": grad_ops._input_cpu, "ready_weight": grad_ops._weight_cpu}
READY |= {"ready_bias": grad_ops._bias_cpu}


@pytest.fixture
def made_ready(monkeypatch):
    """CPU tensors count as a GPU's, and prepared calls compute by torch's operators.

    Returns the prepared calls' names, layouts and numbers.
    """
    made = []

    def ready(name, compute, *what):
        if name == "ready":
            ops._problem(*(one and one[0] for one in what[:3]), *what[3:8])
        made.append((name, what))
        numbers = [one for one in what if type(one) in direct.NUMBERS]

        def computed(*tensors):
            with torch.no_grad():
                return compute(*tensors, *numbers)

        return computed

    monkeypatch.setattr(functional, "_ours", lambda *_: True)
    monkeypatch.setattr(ops, "computes_on", lambda index: index == -1)
    for name, compute in READY.items():
        monkeypatch.setattr(ops, name, functools.partial(ready, name, compute))
    functional._call.cache_clear()
    ops._ready_gradients.cache_clear()
    yield made
    functional._call.cache_clear()
    ops._ready_gradients.cache_clear()


@pytest.fixture
def by_operator(monkeypatch):
    """A function that calls the operator through the dispatcher."""

    def by_operator(call):
        with monkeypatch.context() as patch:
            patch.setattr(direct, "is_clear", lambda *_: False)
            return call()

    return by_operator


@pytest.fixture
def routes(monkeypatch):
    """Lists of the operators that went around the dispatcher, of the others, and of calls with one look-up."""
    seen, route, at_once = {"around": [], "through": [], "at once": []}, direct.route, functional.at_once

    def noted(operator, arguments):
        way = route(operator, arguments)
        seen["through" if way is operator else "around"].append(operator)
        return way

    def noted_call(*arguments):
        call = at_once(*arguments)
        if call:
            seen["at once"].append(call)
        return call

    monkeypatch.setattr(direct, "route", noted)
    monkeypatch.setattr(functional, "at_once", noted_call)
    return seen


def tensors_of(problem, **kind):
    x, w, _ = operands(problem, torch.float64)
    tensors = x, w, torch.randn(problem.out_channels, dtype=torch.float64)
    return [tensor.requires_grad_(**kind) for tensor in tensors]


def call(*tensors, problem=PROBLEM):
    return numba_tconv.conv_transpose1d(*tensors, **parameters(problem))


def assert_same(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.stride(), ours.requires_grad) == (theirs.dtype, theirs.stride(), theirs.requires_grad)
        assert torch.equal(ours, theirs)
