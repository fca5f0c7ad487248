"""The ring of stages as an order of waits: which stage and which phase a slot is."""

import pytest

from numba_tconv.kernels.common import pipeline
from numba_tconv.kernels.common.pipeline import EMPTY, FULL, Pipe, Slot

BARRIERS = 4096  # bytes of shared memory where they lie


@pytest.fixture
def told(monkeypatch):
    seen = []
    for name in ("mbarrier_init", "mbarrier_arrive", "mbarrier_wait"):
        monkeypatch.setattr(pipeline, name, lambda *given, name=name: seen.append((name[9:], *given)))
    return seen


def ring(stages):
    return Pipe(BARRIERS, BARRIERS + 8 * stages, stages)


def turn(stages, number, parity=FULL):
    """The slot of a ring's ``number``-th turn."""
    return number % stages, (parity + number // stages) % 2


@pytest.mark.parametrize("parity", [FULL, EMPTY])
@pytest.mark.parametrize("stages", [1, 3, 4])
def test_a_slot_is_a_stage_and_a_phase(stages, parity):
    pipe, slot = ring(stages), Slot(0, parity)
    for number in range(4 * stages):
        assert slot == turn(stages, number, parity)
        assert pipeline.stage_before.py_func(pipe, slot) == (number - 1) % stages
        slot = pipeline.advance.py_func(pipe, slot)


def test_each_stage_has_two_barriers_of_its_own(told):
    pipe = ring(4)
    for stage in range(4):
        pipeline.init_stage.py_func(pipe, stage, 1, 128)
    full, empty = ([address for _, address, count in told if count == arrivals] for arrivals in (1, 128))
    assert full == [BARRIERS, BARRIERS + 8, BARRIERS + 16, BARRIERS + 24]
    assert empty == [address + 32 for address in full]


def test_what_a_slot_waits_for_and_who_is_told(told):
    pipe, slot = ring(4), Slot(2, 1)
    pipeline.wait_full.py_func(pipe, slot)
    pipeline.release.py_func(pipe, slot.stage)
    full, empty = BARRIERS + 16, BARRIERS + 48
    assert told == [("wait", full, 1), ("arrive", empty)]
