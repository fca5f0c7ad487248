"""How CUDA-core gradients read grad_output: by pairs of an output channel and a phase.

Input position ``i`` and tap ``k = a + b*rows`` meet grad_output at ``i*stride - padding + a*dilation + b*step*stride``
(formula/taps.py). With

    row of the pair (co, a), column j = grad_output[co, j*stride - padding + a*dilation]

tap ``b`` reads column ``i + b*step``: a correlation without stride. Samples lie end to end, each with its positions and
the columns that taps reach beyond. Outside of grad_output are zeros."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.arguments import Signal
from numba_tconv.ptx import cp_async, device_function, recomputed
from numba_tconv.runtime.elements import ELEMENTS

NOWHERE = -1  # a column outside the signal
COPY = 6  # instructions an element


@dataclass(frozen=True)
class Window:
    """``channels`` by ``phases`` rows of ``width`` columns, ``pitch`` elements apart.

    A copy takes ``vector`` columns; ``locating``: instructions to find one. ``whole``: all ``channels`` exist."""

    dtype: torch.dtype
    phases: int
    channels: int
    width: int
    pitch: int
    threads: int
    locating: int
    vector: int = 1
    whole: bool = False

    @cached_property
    def lanes(self) -> int:
        """Copies of a row at a time, for fewest instructions."""

        def cost(lanes):
            teams = self.teams_of(lanes)
            a_thread = self.slots_of(lanes) * (self.locating + COPY * -(-self.channels // teams))
            return a_thread * (-(-teams * self.phases * lanes // 32) + self.threads / 32)

        most = min(-(-self.width // self.vector), self.threads // self.phases)
        return min(range(most, 0, -1), key=cost)

    def teams_of(self, lanes: int) -> int:
        return min(self.channels, self.threads // (self.phases * lanes))

    def slots_of(self, lanes: int) -> int:
        return -(-self.width // (lanes * self.vector))

    @property
    def teams(self) -> int:
        return self.teams_of(self.lanes)

    @property
    def slots(self) -> int:
        return self.slots_of(self.lanes)


def evenly(count: int, most: int) -> tuple[int, int]:
    """Size and number of even pieces, at most ``most`` each."""
    pieces = -(-count // most)
    return -(-count // pieces), pieces


def columns(problem: Problem, tap_chunk: int) -> int:
    """Columns of a sample with ``tap_chunk`` taps a window."""
    return problem.length + (tap_chunk - 1) * problem.taps.step


@cache
def make_copy(dtype: torch.dtype, vector: int = 1):
    """Build ``(shared, s, source, g, valid)``: shared[s] = source[g], converted, or zero if not valid.

    Accumulator elements are copied by cp.async, ``vector`` at a time."""
    element = ELEMENTS[dtype]
    load, accumulator = element.load, element.accumulator
    if element.storage == accumulator:
        return cp_async(vector)

    @device_function
    def copy(shared, s, source, g, valid):
        shared[uint64(s)] = load(source[uint64(g)]) if valid else accumulator(0)

    return copy


class Columns(NamedTuple):
    sample: int
    position: int
    sample_columns: int
    tap: int  # grad_output's: the first phase's first tap
    phases_left: int
    signal: Signal
    sizes: tuple


@device_function
def locate(n, i, column, sample_columns):
    """Sample and position ``column`` columns, below 2**31, after position ``i`` of sample ``n``."""
    i += column
    if i >= sample_columns:
        n += 1
        i -= sample_columns
        if i >= sample_columns:
            samples = int64(uint32(i) // uint32(sample_columns))
            n += samples
            i -= samples * sample_columns
    return n, i


def make_locate(stride: int, dilation: int) -> Callable:
    """Build (columns: Columns, column, a) -> element of grad_output at channel 0, or NOWHERE."""

    @device_function
    def locate_element(columns, column, a):
        n, i = locate(columns.sample, columns.position, column, columns.sample_columns)
        signal, sizes = columns.signal, columns.sizes
        o = i * stride - sizes.padding + (columns.tap + a) * dilation
        inside = n < sizes.batch and a < columns.phases_left and o >= 0 and o < sizes.out_length
        return n * signal.stride_n + o * signal.stride_l if inside else int64(NOWHERE)

    return locate_element


def make_fetch(window: Window, locate_element: Callable) -> Callable:
    """Build the copy of a window of ``source`` to ``shared[target:]``.

    ``first_channel``: element of the first channel at column 0. Columns at NOWHERE and channels from ``channels_left``
    on become zeros."""
    phases, channels, width, pitch = window.phases, window.channels, window.width, window.pitch
    lanes, teams, slots, vector, whole = window.lanes, window.teams, window.slots, window.vector, window.whole
    turns, hop, channel_hop = -(-channels // teams), lanes * vector, teams * phases * pitch
    copy = make_copy(window.dtype, vector)

    @device_function
    def fetch(shared, target, source, first_channel, stride_c, channels_left, columns):
        thread = uint32(recomputed(int32(cuda.threadIdx.x)))
        a, quotient = int64(thread % uint32(phases)), thread // uint32(phases)
        column, team = int64(quotient % uint32(lanes)) * vector, int64(quotient // uint32(lanes))
        if team < teams:
            first_channel += team * stride_c
            team_channels = int32(channels_left - team)
            target = target + (team * phases + a) * pitch + column
            for slot in range(slots):
                if (slot + 1) * hop <= width or column < width - slot * hop:
                    element = locate_element(columns, column + slot * hop, a)
                    inside = element >= 0
                    element += first_channel
                    for turn in range(turns):
                        if (turn + 1) * teams <= channels or team < channels - turn * teams:
                            valid = inside and (whole or turn * teams < team_channels)
                            copy(shared, target + slot * hop + turn * channel_hop, source, element, valid)
                            element += teams * stride_c

    return fetch
