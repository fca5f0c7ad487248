"""The pipeline of warp-specialised kernels: a ring of stages in shared memory.

Each stage has two mbarriers, full and empty. Their phases alternate between parities 0 and 1; a slot carries the parity
to wait for. A warp two rounds ahead of another would mistake an older phase for its own."""

from __future__ import annotations

from typing import NamedTuple

from numba import int32

from numba_tconv.ptx import device_function, mbarrier_arrive, mbarrier_init, mbarrier_wait

BARRIER = 8  # bytes of an mbarrier
FULL, EMPTY = 0, 1  # parities of the first waits; a producer's ends at once


class Pipe(NamedTuple):
    """The first stage's barriers, as shared addresses; the others follow."""

    full: int
    empty: int
    stages: int


class Slot(NamedTuple):
    """A turn at a stage; a consumer's first is ``Slot(int32(0), int32(FULL))``, a producer's has EMPTY."""

    stage: int
    parity: int


@device_function
def init_stage(pipe, stage, fills, releases):
    """Initialise a stage, by one thread: ``fills`` arrivals make it full, ``releases`` empty."""
    mbarrier_init(pipe.full + BARRIER * stage, fills)
    mbarrier_init(pipe.empty + BARRIER * stage, releases)


@device_function
def wait_full(pipe, slot):
    mbarrier_wait(pipe.full + BARRIER * slot.stage, slot.parity)


@device_function
def release(pipe, stage):
    """Arrive: this thread, or the warp that it signals for, has read the stage."""
    mbarrier_arrive(pipe.empty + BARRIER * stage)


@device_function
def stage_before(pipe, slot):
    return slot.stage - 1 if slot.stage > 0 else pipe.stages - 1


@device_function
def advance(pipe, slot):
    stage, parity = int32(slot.stage + 1), slot.parity
    if stage == pipe.stages:
        stage, parity = int32(0), int32(parity ^ 1)
    return Slot(stage, parity)
