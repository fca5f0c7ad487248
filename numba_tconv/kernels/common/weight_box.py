"""A stage's weights, copied to shared memory as they lie: how every packing kernel begins.

Neighbours in global memory are taps of one channel, in a packed stage different channels. So a block copies a box along
the taps, in vectors where possible, and gathers from shared memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.ptx import cp_async, cp_async_commit, cp_async_wait, device_function, global_address
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.layout import Layout

from .integer import divided

BATCH = 4  # elements in flight
ELEMENTWISE, ALONG_CHANNELS, ALONG_PHASES = 0, 1, 2


@dataclass(frozen=True)
class Box:
    """What a block packs: input channels, output channels, taps of a row, phases."""

    dtype: torch.dtype
    depth: int
    channels: int
    taps: int  # of a row
    phases: int
    rows: int  # of an output channel

    @property
    def vector(self) -> int:
        return 16 // self.dtype.itemsize

    @property
    def run(self) -> int:
        """Weights of an input channel, in vectors."""
        return -(-self.channels * self.taps * self.phases // self.vector) * self.vector

    @property
    def shared_bytes(self) -> int:
        return self.depth * self.run * self.dtype.itemsize

    @property
    def phases_are_vectors(self) -> bool:
        return self.phases % self.vector == 0 and self.rows % self.vector == 0

    def way(self, w: Layout, whole: bool) -> int:
        """How 16-byte aligned boxes of weights like ``w`` are copied.

        ``whole``: with all phases and taps of their channels."""
        (_, _, kernel_size), (stride_c, stride_o, stride_k), v = w.shape, w.strides, self.vector
        if stride_k != 1 or stride_c % v:
            return ELEMENTWISE
        if self.phases_are_vectors:
            return ELEMENTWISE if stride_o % v or kernel_size % v else ALONG_PHASES
        return ALONG_CHANNELS if whole and stride_o == kernel_size else ELEMENTWISE


class Weight(NamedTuple):
    k: int  # input channel
    channel: int
    tap: int
    phase: int


class Pitch(NamedTuple):
    """Elements of an output channel, and of a tap."""

    channel: int
    tap: int


class Limits(NamedTuple):
    inputs: int
    outputs: int
    phases: int
    taps: int
    whole: bool


class LoadBox(NamedTuple):
    """Device functions for a box from ``first`` (input channel, output channel, tap) and row ``row`` on.

    ``left``: (input, output channels) from there.

    * ``load`` copies by all threads and waits; returns the Pitch. Missing weights keep old content.
    * ``at``: a weight's index in ``shared``.
    * ``limits``: how many weights exist.
    * ``within``: whether a weight exists."""

    load: Callable
    at: Callable
    limits: Callable
    within: Callable


def make_copies(box: Box, threads: int) -> tuple:
    """Build copies along channels, along phases, and one by one."""
    depth, run, vector, phases, rows, taps = box.depth, box.run, box.vector, box.phases, box.rows, box.taps
    of_channel, all_channels, storage = taps * phases, box.channels, ELEMENTS[box.dtype].storage
    elements, pieces = depth * all_channels * of_channel, phases // vector
    vectors = depth * all_channels * taps * pieces if box.phases_are_vectors else 0
    copy = cp_async(vector)

    @device_function
    def copy_runs(shared, w, source, stride_i, vectors, inputs_left):
        e, end = int32(cuda.threadIdx.x), int32(min(inputs_left, depth) * vectors)
        while e < end:
            k, p = divided(e, vectors)
            copy(shared, k * run + p * vector, w, source + k * stride_i + p * vector, True)
            e = int32(e + threads)

    @device_function
    def place(e, phase_steps):
        """``phase_steps``: phases, or vectors of phases."""
        of_taps = uint32(e) // uint32(phase_steps)
        phase = int32(e - of_taps * phase_steps)
        of_channels, tap = divided(int32(of_taps), int32(taps))
        k, channel = divided(of_channels, int32(all_channels))
        return Weight(k, channel, tap, phase)

    @device_function
    def copy_phases(shared, w, source, strides, left, taps_left):
        e = int32(cuda.threadIdx.x)
        while e < vectors:
            at = place(e, pieces)
            t = int32(at.tap * rows + at.phase * vector)
            if at.k < left[0] and at.channel < left[1] and t < taps_left:
                target = at.k * run + at.channel * of_channel + at.tap * phases + at.phase * vector
                copy(shared, target, w, source + at.k * strides[0] + at.channel * strides[1] + t, True)
            e = int32(e + threads)

    @device_function
    def copy_elements(shared, w, source, strides, left, taps_left):
        values = cuda.local.array(BATCH, dtype=storage)
        first = int32(cuda.threadIdx.x)
        while first < elements:
            for z in range(BATCH):
                at = place(first + z * threads, phases)
                t = int32(at.tap * rows + at.phase)
                exists = at.k < left[0] and at.channel < left[1] and t < taps_left and at.k < depth
                index = source + at.k * strides[0] + at.channel * strides[1] + t * strides[2]
                # No branch: loads overlap.
                values[z] = w[uint64(index if exists else int64(0))]
            for z in range(BATCH):
                e = int32(first + z * threads)
                if e < elements:
                    at = place(e, phases)
                    shared[uint64(at.k * run + at.channel * of_channel + at.tap * phases + at.phase)] = values[z]
            first = int32(first + BATCH * threads)

    return copy_runs, copy_phases, copy_elements


def make_load_box(box: Box, threads: int) -> LoadBox:
    depth, run, vector, phases, rows, taps = box.depth, box.run, box.vector, box.phases, box.rows, box.taps
    itemsize, by_phases, all_channels = box.dtype.itemsize, box.phases_are_vectors, box.channels
    of_channel, all_taps, farthest = taps * phases, taps * rows, (taps - 1) * rows + phases
    copy_runs, copy_phases, copy_elements = make_copies(box, threads)
    wait = cp_async_wait(0)

    @device_function
    def load(shared, w, strides, first, left, kernel_size, way):
        channel, co, t = first
        left = int32(left[0]), int32(min(left[1], all_channels))
        taps_left = int32(min(kernel_size - t, int64(all_taps)))
        source = channel * strides[0] + co * strides[1] + t * strides[2]
        aligned = (global_address(w, int64(0)) + source * itemsize) % 16 == 0
        weights = int32(left[1] * int32(kernel_size))
        of_tap = int32(phases)
        of_output = int32(of_channel)
        if not by_phases and way == ALONG_CHANNELS and aligned and weights % vector == 0:
            copy_runs(shared, w, source, strides[0], int32(weights // vector), left[0])
            of_output, of_tap = int32(kernel_size), int32(rows)
        elif by_phases and way == ALONG_PHASES and aligned:
            copy_phases(shared, w, source, strides, left, taps_left)
        else:
            copy_elements(shared, w, source, strides, left, taps_left)
        cp_async_commit()
        wait()
        cuda.syncthreads()
        return Pitch(of_output, of_tap)

    @device_function
    def at(pitch, k, channel, tap, phase):
        return int32(int32(k * run) + int32(channel * pitch.channel) + int32(tap * pitch.tap) + phase)

    @device_function
    def limits(first, row, left, kernel_size):
        rows_left, taps_left = int32(rows - row), int32(min(kernel_size - first[2], int64(all_taps)))
        whole = left[0] >= depth and left[1] >= all_channels and rows_left >= phases and taps_left >= farthest
        return Limits(int32(left[0]), int32(left[1]), rows_left, taps_left, whole)

    @device_function
    def within(limits, k, channel, tap, phase):
        inputs, outputs, rows_left, taps_left = limits.inputs, limits.outputs, limits.phases, limits.taps
        exists = k < inputs and channel < outputs and phase < rows_left
        return exists and tap * rows + phase < taps_left

    return LoadBox(load, at, limits, within)
