"""Selection, cost models, the arguments of every launch, and what the lab says are as recorded in plans.json."""

import pytest

from numba_tconv.ptx import SIMULATOR

if SIMULATOR:
    pytest.skip("the simulator has other blocks and no tensor cores", allow_module_level=True)

from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS

from . import choices, plans
from .lab import said

SHARES = 6  # computed by as many processes


def check(now):
    record = plans.recorded()
    found = list(plans.differences({name: record.get(name) for name in now}, now))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("share", range(SHARES))
def test_plans_are_as_recorded(share):
    """If they are meant to change: python -m tests.plans --record"""
    check(plans.planned(share, SHARES))


def test_the_configurations_of_drawn_problems_are_as_recorded():
    check(choices.everything())


def test_the_lab_says_what_is_recorded():
    check(said.everything())


def test_the_record_has_every_problem_and_every_rung():
    record = plans.recorded()
    lab = "options", "explanations", "cases", "workloads", "waveforms", "roundings", "bounds", "loads", "shown"
    assert list(record) == [*plans.names(), *lab, "studies", "defaults", "pages", "figures", "choices", "GPUs"]
    assert {plan.split()[0] for of in record.values() for plan in of} >= {*RUNGS, *GRADIENTS, "streaming", "float32"}
    assert any(plan.startswith("joined") for of in record.values() for plan in of)


def test_differences_name_their_place():
    before = {"kb64": {"k1_gather": {"grid": "1x1x1", "stride": "1"}, "gone": "all"}}
    now = {"kb64": {"k1_gather": {"grid": "1x1x1", "stride": "2"}, "new": "some"}}
    assert list(plans.differences(before, now)) == [
        "kb64: k1_gather: stride: 1 became 2", "kb64: gone: all became nothing", "kb64: new: nothing became some"
    ]  # fmt: skip
    assert not list(plans.differences(now, now))
