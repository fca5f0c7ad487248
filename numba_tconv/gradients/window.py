"""How the gradients read grad_output: by pairs of an output channel and a phase, each a row of columns.

Input position ``i`` and tap ``k = a + b*rows`` meet grad_output at ``i*stride - padding + a*dilation + b*step*stride``
(formula/taps.py). With

    row of the pair (co, a), column j = grad_output[co, j*stride - padding + a*dilation]

tap ``b`` reads column ``i + b*step``: a correlation without a stride. A window in shared memory holds pairs of
neighbouring phases by some columns, with zeros outside of grad_output. Memory interleaves the phases, so neighbouring
threads fetch neighbouring phases.

Columns run through all samples laid end to end: a sample's positions, and those that the taps of a window reach beyond
the last one. A thread locates a column once for all channels that it copies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.ptx import cp_async, device_function, recomputed
from numba_tconv.runtime.elements import ELEMENTS

NOWHERE = -1  # the place of a column outside of the signal
COPY = 6  # instructions, about, that copy an element


@dataclass(frozen=True)
class Window:
    """A window of ``channels`` by ``phases`` rows of ``width`` columns, fetched by a block of threads.

    Rows are ``pitch`` elements apart. A copy takes ``vector`` columns. ``aim`` is the number of instructions, about,
    that locate a column in memory. ``whole``: all ``channels`` always exist."""

    dtype: torch.dtype
    phases: int
    channels: int
    width: int
    pitch: int
    threads: int
    aim: int
    vector: int = 1
    whole: bool = False

    @cached_property
    def lanes(self) -> int:
        """Copies of a row made at a time: as many as take the fewest instructions."""

        def cost(lanes):
            teams = self.teams_of(lanes)
            a_thread = self.slots_of(lanes) * (self.aim + COPY * -(-self.channels // teams))
            # Half of what all warps issue, and half of what the others wait for.
            return a_thread * (-(-teams * self.phases * lanes // 32) + self.threads / 32)

        most = min(-(-self.width // self.vector), self.threads // self.phases)
        return min(range(most, 0, -1), key=cost)

    def teams_of(self, lanes: int) -> int:
        return min(self.channels, self.threads // (self.phases * lanes))

    def slots_of(self, lanes: int) -> int:
        return -(-self.width // (lanes * self.vector))

    @property
    def teams(self) -> int:
        """Channels fetched at a time."""
        return self.teams_of(self.lanes)

    @property
    def slots(self) -> int:
        """Columns of a thread."""
        return self.slots_of(self.lanes)


def evenly(count: int, most: int) -> tuple[int, int]:
    """Split ``count`` into even pieces of at most ``most``: size and number of the pieces."""
    pieces = -(-count // most)
    return -(-count // pieces), pieces


def split_phases(problem: Problem, most: int) -> tuple[int, int, int]:
    """Phases that have taps; phases of a window of at most ``most`` pairs; windows that cover them all."""
    phases = min(problem.taps.rows, problem.kernel_size)
    return phases, *evenly(phases, most)


def split_taps(problem: Problem, most: int) -> tuple[int, int]:
    """Split the taps of a row into even chunks of at most ``most``: taps of a chunk, and chunks."""
    return evenly(problem.taps.taps_per_row, most)


def columns(problem: Problem, tap_chunk: int) -> int:
    """Columns of a sample, where ``tap_chunk`` taps of a row share a window."""
    return problem.length + (tap_chunk - 1) * problem.taps.step


@cache
def make_copy(dtype: torch.dtype, vector: int = 1):
    """A device function ``(shared, s, source, g, valid)``: shared[s] = source[g], converted, or zero if not valid.

    cp.async copies elements of the accumulator's type, ``vector`` at a time, which land at the next wait; half types
    are copied one by one."""
    element = ELEMENTS[dtype]
    load, accumulator = element.load, element.accumulator
    if element.storage == accumulator:
        return cp_async(vector)

    @device_function
    def copy(shared, s, source, g, valid):
        shared[uint64(s)] = load(source[uint64(g)]) if valid else accumulator(0)

    return copy


@device_function
def locate(n, i, column, columns):
    """Sample and position of the ``column``-th column, of fewer than 2**31, after position ``i`` of sample ``n``."""
    i += column
    if i >= columns:
        n += 1
        i -= columns
        # 32 bits suffice, and avoid a 64-bit division.
        if i >= columns:
            samples = int64(uint32(i) // uint32(columns))
            n += samples
            i -= samples * columns
    return n, i


def make_aim(stride: int, dilation: int):
    """A device function that locates a column of a phase in grad_output: its element at channel 0, or NOWHERE.

    ``column`` counts from position ``i`` of sample ``n``, ``a`` from the phase whose first tap is ``tap``. Phases from
    ``phases_left`` on do not exist."""

    @device_function
    def aim(n, i, column, columns, batch, tap, a, phases_left, padding, out_length, stride_n, stride_l):
        n, i = locate(n, i, column, columns)
        o = i * stride - padding + (tap + a) * dilation
        inside = n < batch and a < phases_left and o >= 0 and o < out_length
        return n * stride_n + o * stride_l if inside else int64(NOWHERE)

    return aim


def make_fetch(window: Window, aim):
    """A device function that copies a window into shared memory, from ``base`` on.

    ``aim(context, column, a)`` is a device function that locates a column of the window's phase ``a`` at channel 0, or
    returns NOWHERE. ``offset`` is the element of the window's first channel. Columns at NOWHERE and channels from
    ``channels_left`` on become zeros."""
    phases, channels, width, pitch = window.phases, window.channels, window.width, window.pitch
    lanes, teams, slots, vector, whole = window.lanes, window.teams, window.slots, window.vector, window.whole
    turns, hop, channel_hop = -(-channels // teams), lanes * vector, teams * phases * pitch
    copy = make_copy(window.dtype, vector)

    @device_function
    def fetch(shared, base, g, offset, stride_c, channels_left, aim_context):
        thread = uint32(recomputed(int32(cuda.threadIdx.x)))  # saves registers
        a, rest = int64(thread % uint32(phases)), thread // uint32(phases)
        column, team = int64(rest % uint32(lanes)) * vector, int64(rest // uint32(lanes))
        if team < teams:
            offset += team * stride_c
            left = int32(channels_left - team)
            target = base + (team * phases + a) * pitch + column
            for slot in range(slots):
                if (slot + 1) * hop <= width or column < width - slot * hop:
                    at = aim(aim_context, column + slot * hop, a)
                    inside = at >= 0
                    at += offset
                    for turn in range(turns):
                        if (turn + 1) * teams <= channels or team < channels - turn * teams:
                            valid = inside and (whole or turn * teams < left)
                            copy(shared, target + slot * hop + turn * channel_hop, g, at, valid)
                            at += teams * stride_c

    return fetch
