"""How the gradients read grad_output: by pairs of an output channel and a phase, each as an ordinary row of columns.

Input position ``i`` and tap ``k`` meet grad_output at ``o = i*stride - padding + k*dilation`` (taps.py). The taps of a
row, ``k = a + b*rows``, meet it at ``i*stride - padding + a*dilation + b*step*stride``, so with

    row of the pair (co, a), column j = grad_output[co, j*stride - padding + a*dilation]

tap ``b`` of it reads column ``i + b*step``: a correlation without a stride. A window is some pairs of neighbouring
phases, by some columns, in shared memory; what lies outside of grad_output is zero in it. Memory has the phases
interleaved, so neighbouring threads fetch neighbouring phases.

Columns run through all samples laid end to end, ``columns`` of them a sample: its positions, and as many more as the
taps of a window reach beyond the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from numba import cuda, int32, int64, uint64

from ..elements import ELEMENTS
from ..problem import Problem
from ..ptx import cp_async

NOWHERE = -(2**62)  # where a column of no sample begins: outside of grad_output, whichever tap is added


@dataclass(frozen=True)
class Window:
    """``channels`` by ``phases`` rows of ``width`` columns, ``pitch`` elements apart, fetched by a block of threads."""

    dtype: torch.dtype
    dilation: int
    phases: int
    channels: int
    width: int
    pitch: int
    threads: int

    @cached_property
    def lanes(self) -> int:
        """Columns that are fetched at a time: as many as leave the fewest threads idle, and the most of those."""

        def busy(lanes):
            return self.width / (-(-self.width // lanes) * lanes) * lanes * self.teams_of(lanes)

        fitting = [2**e for e in range(11) if 2**e * self.phases <= self.threads and 2**e < 2 * self.width]
        return max(fitting, key=lambda lanes: (round(busy(lanes), 6), lanes))

    def teams_of(self, lanes: int) -> int:
        return min(self.channels, self.threads // (self.phases * lanes))

    @property
    def teams(self) -> int:
        """Channels that are fetched at a time."""
        return self.teams_of(self.lanes)


def split_phases(problem: Problem, most: int) -> tuple[int, int, int]:
    """Phases that have taps; how many of them a window of at most ``most`` pairs takes; windows that take them all."""
    phases = min(problem.taps.rows, problem.kernel_size)
    parts = -(-phases // most)
    return phases, -(-phases // parts), parts


def split_taps(problem: Problem, most: int) -> tuple[int, int]:
    """The taps of a row in even chunks of at most ``most``: taps of a chunk, and chunks."""
    taps = problem.taps.taps_per_row
    chunks = -(-taps // most)
    return -(-taps // chunks), chunks


def columns(problem: Problem, tap_chunk: int) -> int:
    """Columns of a sample, where ``tap_chunk`` taps of a row share a window."""
    return problem.length + (tap_chunk - 1) * problem.taps.step


@cache
def make_copy(dtype: torch.dtype, vector: int = 1):
    """``(shared, s, source, g, valid)``: shared[s] = source[g], converted, or zero where not valid.

    The accumulators' own types are copied by cp.async, which lands at the next wait, ``vector`` elements at a time;
    half types one by one.
    """
    element = ELEMENTS[dtype]
    load, accumulator = element.load, element.accumulator
    if element.storage == accumulator:
        return cp_async(vector)

    @cuda.jit(device=True, inline="always")
    def copy(shared, s, source, g, valid):
        shared[uint64(s)] = load(source[uint64(g)]) if valid else accumulator(0)

    return copy


@cuda.jit(device=True, inline="always")
def locate(n, i, column, columns):
    """Sample and position of the ``column``-th column after position ``i`` of sample ``n``."""
    i += column
    if i >= columns:  # seldom: a division of 64 bits takes a hundred instructions
        n += i // columns
        i %= columns
    return n, i


@cache
def make_fetch(window: Window):
    """The device function that copies a window of grad_output into shared memory.

    ``source`` and ``start`` hold, from entry ``table`` on, where tap 0 reads for each column: its place in memory at
    channel 0, and its output position, NOWHERE for a column of no sample. ``tap`` is the tap of the window's first
    phase, ``offset`` the place of its first channel; phases and channels from ``phases_left`` and ``channels_left`` on
    are zeros.
    """
    phases, channels, width, pitch = window.phases, window.channels, window.width, window.pitch
    lanes, teams, dilation = window.lanes, window.teams, window.dilation
    copy = make_copy(window.dtype)

    @cuda.jit(device=True, inline="always")
    def fetch(shared, base, g, source, start, table, offset, stride_c, stride_l, tap, phases_left, channels_left,
              out_length):  # fmt: skip
        thread = int32(cuda.threadIdx.x)
        a = int32(thread % phases)
        column = int32(thread // phases % lanes)
        team = int32(thread // (phases * lanes))
        if team < teams:
            shift = (tap + a) * dilation
            offset += shift * stride_l + team * stride_c
            hop = teams * stride_c
            target = int32(base + (team * phases + a) * pitch)
            while column < width:
                o = start[uint64(table + column)] + shift
                inside = a < phases_left and o >= 0 and o < out_length
                at = source[uint64(table + column)] + offset
                to = int32(target + column)
                c = team
                while c < channels:
                    valid = inside and c < channels_left
                    copy(shared, to, g, at if valid else int64(0), valid)
                    at += hop
                    to = int32(to + teams * phases * pitch)
                    c = int32(c + teams)
                column = int32(column + lanes)

    return fetch
