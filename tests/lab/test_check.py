"""Parity of one problem: every rung beside torch and the plain loops, and judged."""

import math

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.rung import Rung
from numba_tconv.lab.measure import check
from numba_tconv.lab.measure.directions import by_torch
from numba_tconv.selection.directions import RESULTS

PROBLEM = Problem(2, 4, 6, 3, 11, stride=2, padding=1, groups=2, bias=True)


class Stand(Rung):
    """Stands for a rung: torch computes, then the result is spoilt, or its last element left."""

    def __init__(self, of, spoil):
        self.of, self.spoil = of, spoil

    def supports(self, problem, dtype, precision):
        return None if precision == "ieee" else f"not in {precision}"

    def run(self, *given, precision):
        *operands, result, p = given
        assert precision == "ieee"
        assert result.isnan().all()
        assert all(one is other for one, other in zip(operands, self.operands.of(self.of), strict=True))
        values = by_torch(self.of, self.operands, p)
        if self.spoil:
            self.spoil(result.copy_(values))
        else:
            result.view(-1)[:-1] = values.view(-1)[:-1]


def last_element(value):
    def spoil(result):
        result.view(-1)[-1] = value

    return spoil


@pytest.fixture
def outcomes(monkeypatch):
    """A function for the outcomes of rungs, some of which spoil results or leave the last element."""
    spoils = {"right": lambda result: None, "zero": last_element(0), "nan": last_element(math.nan), "unwritten": None}
    make_operands = check.bench.make_operands

    def make(*arguments, **keywords):
        Stand.operands = make_operands(*arguments, **keywords)
        return Stand.operands

    monkeypatch.setattr(check, "SIMULATOR", True)  # tensors on the CPU
    monkeypatch.setattr(check.bench, "make_operands", make)
    monkeypatch.setattr(check, "rungs_of", lambda of: {name: Stand(of, spoil) for name, spoil in spoils.items()})

    def of(precision):
        found = {result: {} for result in RESULTS}
        for result, outcome in check.parity(PROBLEM, torch.float32, precision):
            found[result][outcome.name] = outcome
        return found

    return of


def test_every_result_is_judged(outcomes):
    for found in outcomes("ieee").values():
        names = ["scatter loops", "torch", "right", "zero", "nan", "unwritten"]
        assert list(found) == names
        assert [found[name].right for name in names] == [True, True, True, False, False, False]
        assert all(one.error is not None for one in found.values())


def test_a_wrong_output_has_its_place(outcomes):
    found = outcomes("ieee")
    last = PROBLEM.batch - 1, PROBLEM.out_channels - 1, PROBLEM.out_length - 1
    for name in ("zero", "nan", "unwritten"):
        where = found["forward"][name].where
        assert (where.n, where.channel, where.position) == last
        assert where.wrong == 1
    assert found["forward"]["right"].where is None
    assert all(one.where is None for result in RESULTS[1:] for one in found[result].values())


def test_what_cannot_be_done_is_said(outcomes):
    for found in outcomes("tf32").values():
        assert found["right"] == check.Outcome("right", None, True, "cannot do it: not in tf32")


def test_how_many_outcomes_there_are(outcomes):
    assert check.steps() == sum(map(len, outcomes("ieee").values()))


@pytest.mark.parametrize("empty", [Problem(0, 2, 3, 3, 12), Problem(2, 2, 3, 3, 12, padding=7)], ids=str)
def test_a_problem_without_outputs_is_refused(empty):
    with pytest.raises(ValueError, match="has no outputs"):
        check.require_checkable(empty)
    check.require_checkable(PROBLEM)
