"""The weights of one stage, copied to shared memory as they lie: the first half of every packing kernel.

In global memory the taps of an output channel are neighbours; in a packed stage, rows of different channels are. So a
block copies a box (input channel, output channel, tap) along the taps, and its threads gather from shared memory.

Copies take 16 bytes in runs of whole output channels, if a box has all their taps, or of neighbouring phases, if their
number is a multiple of 16 bytes. Other weights are copied one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.ptx import cp_async, cp_async_commit, cp_async_wait, device_function, global_address
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.layout import Layout

from .integer import divided

BATCH = 4  # elements in flight of a thread, copied one by one
ELEMENTWISE, ALONG_CHANNELS, ALONG_PHASES = 0, 1, 2  # how a box is copied


@dataclass(frozen=True)
class Box:
    """Sizes of the weights (input channel, output channel, tap of a row, phase) that one block packs."""

    dtype: torch.dtype
    depth: int
    channels: int
    taps: int  # of a row
    phases: int
    rows: int  # rows of an output channel, ``phases`` of them in the box; distance of a row's taps

    @property
    def vector(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.dtype.itemsize

    @property
    def run(self) -> int:
        """Most weights of one input channel, rounded up to 16 bytes."""
        return -(-self.channels * self.taps * self.phases // self.vector) * self.vector

    @property
    def shared_bytes(self) -> int:
        return self.depth * self.run * self.dtype.itemsize

    @property
    def phases_are_vectors(self) -> bool:
        return self.phases % self.vector == 0 and self.rows % self.vector == 0

    def way(self, w: Layout, whole: bool) -> int:
        """How boxes of weights (C_in, C_out/groups, K), laid out as ``w``, are copied if they begin at a multiple of 16
        bytes. ``whole``: a box has all phases and taps of its output channels.
        """
        (_, _, kernel_size), (stride_c, stride_o, stride_k), v = w.shape, w.strides, self.vector
        if stride_k != 1 or stride_c % v:
            return ELEMENTWISE
        if self.phases_are_vectors:
            return ELEMENTWISE if stride_o % v or kernel_size % v else ALONG_PHASES
        return ALONG_CHANNELS if whole and stride_o == kernel_size else ELEMENTWISE


def make_load_box(box: Box, threads: int):
    """Four device functions for a box that begins at input channel, output channel and tap ``first`` and at row
    ``row``.

    * ``load(shared, w, strides, first, left, kernel_size, way)`` copies the box by all ``threads`` of a block and
      waits. ``left``: input and output channels from the first on. Returns ``lies``: elements of an output channel, and
      of a tap of all phases. Places of missing weights keep their old content.
    * ``at(lies, k, channel, tap, phase)``: index in ``shared`` of a weight of the box.
    * ``limits(first, row, left, kernel_size)``: input channels, output channels, phases and taps that exist, and
      whether the whole box does.
    * ``within(limits, k, channel, tap, phase)``: whether a weight exists.
    """
    depth, run, vector, phases, rows, taps = box.depth, box.run, box.vector, box.phases, box.rows, box.taps
    storage, itemsize, by_phases = ELEMENTS[box.dtype].storage, box.dtype.itemsize, box.phases_are_vectors
    of_channel, all_channels = taps * phases, box.channels
    elements, pieces = depth * all_channels * of_channel, phases // vector  # elements; vectors in a run of phases
    vectors = depth * all_channels * taps * pieces if by_phases else 0
    all_taps, farthest = taps * rows, (taps - 1) * rows + phases
    copy, wait = cp_async(vector), cp_async_wait(0)

    @device_function
    def load_runs(shared, w, source, stride_c, count, channels_left):
        """Copy along the output channels: ``count`` vectors of each input channel."""
        e, end = int32(cuda.threadIdx.x), int32(min(channels_left, depth) * count)
        while e < end:
            k, p = divided(e, count)
            copy(shared, k * run + p * vector, w, source + k * stride_c + p * vector, True)
            e = int32(e + threads)

    @device_function
    def place(e, along):
        """Input channel, output channel, tap and phase of the ``e``-th element or vector of a box in memory order.
        ``along``: phases, in elements or vectors.
        """
        rest = uint32(e) // uint32(along)
        a = int32(e - rest * along)
        rest, b = divided(int32(rest), int32(taps))
        k, channel = divided(rest, int32(all_channels))
        return k, channel, b, a

    @device_function
    def load_phases(shared, w, source, strides, left, taps_left):
        e = int32(cuda.threadIdx.x)
        while e < vectors:
            k, channel, b, a = place(e, pieces)
            t = int32(b * rows + a * vector)
            if k < left[0] and channel < left[1] and t < taps_left:
                to = k * run + channel * of_channel + b * phases + a * vector
                copy(shared, to, w, source + k * strides[0] + channel * strides[1] + t, True)
            e = int32(e + threads)

    @device_function
    def load_elements(shared, w, source, strides, left, taps_left):
        values = cuda.local.array(BATCH, dtype=storage)
        first = int32(cuda.threadIdx.x)
        while first < elements:
            for z in range(BATCH):
                k, channel, b, a = place(first + z * threads, phases)
                t = int32(b * rows + a)
                there = k < left[0] and channel < left[1] and t < taps_left and k < depth
                at = source + k * strides[0] + channel * strides[1] + t * strides[2]
                # A missing weight loads the first one instead: no branch, so the loads overlap.
                values[z] = w[uint64(at if there else int64(0))]
            for z in range(BATCH):
                e = int32(first + z * threads)
                if e < elements:
                    k, channel, b, a = place(e, phases)
                    shared[uint64(k * run + channel * of_channel + b * phases + a)] = values[z]
            first = int32(first + BATCH * threads)

    @device_function
    def load(shared, w, strides, first, left, kernel_size, way):
        channel, co, t = first
        left = int32(left[0]), int32(min(left[1], all_channels))
        taps_left = int32(min(kernel_size - t, int64(all_taps)))
        source = channel * strides[0] + co * strides[1] + t * strides[2]
        aligned = (global_address(w, int64(0)) + source * itemsize) % 16 == 0
        weights = int32(left[1] * int32(kernel_size))
        of_tap = int32(phases)
        own = int32(of_channel)
        if not by_phases and way == ALONG_CHANNELS and aligned and weights % vector == 0:
            load_runs(shared, w, source, strides[0], int32(weights // vector), left[0])
            own, of_tap = int32(kernel_size), int32(rows)
        elif by_phases and way == ALONG_PHASES and aligned:
            load_phases(shared, w, source, strides, left, taps_left)
        else:
            load_elements(shared, w, source, strides, left, taps_left)
        cp_async_commit()
        wait()
        cuda.syncthreads()
        return own, of_tap

    @device_function
    def at(lies, k, channel, tap, phase):
        own, of_tap = lies
        return int32(int32(k * run) + int32(channel * own) + int32(tap * of_tap) + phase)

    @device_function
    def limits(first, row, left, kernel_size):
        rows_left, taps_left = int32(rows - row), int32(min(kernel_size - first[2], int64(all_taps)))
        full = left[0] >= depth and left[1] >= all_channels and rows_left >= phases and taps_left >= farthest
        return int32(left[0]), int32(left[1]), rows_left, taps_left, full

    @device_function
    def within(limits, k, channel, tap, phase):
        channels_left, outputs_left, rows_left, taps_left, _ = limits
        there = k < channels_left and channel < outputs_left and phase < rows_left
        return there and tap * rows + phase < taps_left

    return load, at, limits, within
