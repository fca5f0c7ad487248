"""The pipeline of warp-specialised kernels: a ring of stages in shared memory.

Producers wait until a stage is empty and fill it; consumers wait until it is full, read it and release it. Each stage
has two mbarriers. The phases of an mbarrier alternate between parities 0 and 1, so a slot carries the parity of the
phase to wait for. A warp must never be two rounds ahead of another: it would mistake an older phase for its own.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import int32

from numba_tconv.ptx import device_function, mbarrier_arrive, mbarrier_init, mbarrier_wait

BARRIER = 8  # bytes of an mbarrier
FULL, EMPTY = 0, 1  # parities of the first waits: a consumer's, and a producer's, which ends at once


class Pipe(NamedTuple):
    """The barriers of a ring, as addresses in shared memory of the first stage's; those of the others follow."""

    full: int
    empty: int
    stages: int


class Slot(NamedTuple):
    """A turn at a stage: the first is ``Slot(int32(0), int32(FULL))`` or, for a producer, with EMPTY."""

    stage: int
    parity: int


@device_function
def init_stage(pipe, stage, fills, releases):
    """Initialise the barriers of a stage: ``fills`` arrivals make it full, ``releases`` arrivals empty. One thread."""
    mbarrier_init(pipe.full + BARRIER * stage, fills)
    mbarrier_init(pipe.empty + BARRIER * stage, releases)


@device_function
def wait_full(pipe, slot):
    mbarrier_wait(pipe.full + BARRIER * slot.stage, slot.parity)


@device_function
def release(pipe, stage):
    """One arrival: this thread, or the warp it signals for, has read the stage."""
    mbarrier_arrive(pipe.empty + BARRIER * stage)


@device_function
def stage_before(pipe, slot):
    return slot.stage - 1 if slot.stage > 0 else pipe.stages - 1


@device_function
def advance(pipe, slot):
    """The next slot."""
    stage, parity = int32(slot.stage + 1), slot.parity
    if stage == pipe.stages:
        stage, parity = int32(0), int32(parity ^ 1)
    return Slot(stage, parity)
