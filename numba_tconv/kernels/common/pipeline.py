"""A ring of stages in shared memory.

A stage has two mbarriers, full and empty, whose phases alternate between parities 0 and 1."""

from typing import NamedTuple

from numba import int32

from numba_tconv.ptx import device_function, mbarrier_arrive, mbarrier_init, mbarrier_wait

BARRIER = 8  # bytes
FULL, EMPTY = 0, 1  # parities of a first wait; a producer's ends at once


class Pipe(NamedTuple):
    """Shared addresses of stage 0's barriers."""

    full: int
    empty: int
    stages: int


class Slot(NamedTuple):
    """A turn at a stage, and the parity to wait for: first FULL for consumers, EMPTY for producers."""

    stage: int
    parity: int


@device_function
def init_stage(pipe, stage, fills, releases):
    """One thread initialises a stage: ``fills`` arrivals make it full, ``releases`` arrivals empty."""
    mbarrier_init(pipe.full + BARRIER * stage, fills)
    mbarrier_init(pipe.empty + BARRIER * stage, releases)


@device_function
def wait_full(pipe, slot):
    mbarrier_wait(pipe.full + BARRIER * slot.stage, slot.parity)


@device_function
def release(pipe, stage):
    """Arrive at the stage's empty barrier: this thread, or its warp, has read it."""
    mbarrier_arrive(pipe.empty + BARRIER * stage)


@device_function
def stage_before(pipe, slot):
    return slot.stage - 1 if slot.stage > 0 else pipe.stages - 1


@device_function
def advance(pipe, slot):
    """The next turn: the parity changes when the ring begins again."""
    stage, parity = int32(slot.stage + 1), slot.parity
    if stage == pipe.stages:
        stage, parity = int32(0), int32(parity ^ 1)
    return Slot(stage, parity)
