"""The kernel of depthwise steps (kernels/README.md).

    state, x, w --loads that do not wait for each other--> registers --> y, new state

Products are added in the order of k2_polyphase."""

from dataclasses import dataclass
from functools import cache

import torch
from numba import cuda, int64, types, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.formula.taps import Taps
from numba_tconv.ptx import griddepcontrol_launch_dependents, griddepcontrol_wait
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel

from .arguments import signature_of
from .kernel import is_live

MOST_FRAMES, MOST_TAPS, MOST_KEPT = 4, 32, 4
THREADS = 128  # of a block with one new frame
MOST_SLOTS = 65_535  # of a grid's second axis


@dataclass(frozen=True)
class Config:
    """A thread computes up to ``frames`` new frames."""

    dtype: torch.dtype
    taps: Taps
    frames: int
    threads: int

    @property
    def kept(self) -> int:
        """Frames of the state."""
        return self.taps.shift(self.taps.kernel_size - 1)


def refusal(problem: Problem) -> str | None:
    """Why the kernel does not compute the step."""
    p = problem
    if p.in_channels_per_group != 1 or p.out_channels_per_group != 1:
        return "it takes one channel a group"
    if p.length > MOST_FRAMES or p.kernel_size > MOST_TAPS or p.taps.shift(p.kernel_size - 1) > MOST_KEPT:
        return f"it takes up to {MOST_FRAMES} new frames, {MOST_TAPS} taps and {MOST_KEPT} frames kept"
    if p.length * p.stride > MOST_TAPS * 2:
        return f"it computes up to {MOST_TAPS * 2} outputs"
    if p.batch > MOST_SLOTS:
        return f"it takes up to {MOST_SLOTS} slots"
    return None


def choose(problem: Problem, dtype: torch.dtype) -> Config:
    frames = 1 << (problem.length - 1).bit_length()
    return Config(dtype, problem.taps, frames, THREADS // frames)


@cache
def make_kernel(config: Config) -> Kernel:
    element, taps = ELEMENTS[config.dtype], config.taps
    threads, kept, frames = config.threads, config.kept, config.frames
    load, store, accumulator, storage = element.load, element.store, element.accumulator, element.storage
    kernel_size, stride, dilation = taps.kernel_size, taps.stride, taps.dilation
    window, outputs = kept + frames, frames * stride

    def streaming_depthwise(x, state, w, bias, mask, y, channels, new_frames):
        weights = cuda.local.array(kernel_size, dtype=storage)
        inputs = cuda.local.array(window, dtype=storage)
        totals = cuda.local.array(outputs, dtype=accumulator)
        c, n = int64(cuda.blockIdx.x) * threads + cuda.threadIdx.x, int64(cuda.blockIdx.y)
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        if c >= channels:
            return
        row = (n * channels + c) * kept
        of_x, of_w = n * x.stride_n + c * x.stride_c, c * w.stride_i
        for k in range(kernel_size):
            weights[k] = w.data[uint64(of_w + k * w.stride_k)]
        for f in range(kept):
            inputs[f] = state[uint64(row + f)]
        for t in range(frames):
            inputs[kept + t] = storage(0)
            if t < new_frames:
                inputs[kept + t] = x.data[uint64(of_x + t * x.stride_l)]
        offset = load(bias.data[uint64(c)]) if bias.exists else accumulator(0)
        advances = is_live(mask, n)
        for o in range(outputs):
            totals[o] = offset
        for k in range(kernel_size):
            phase, shift = k * dilation % stride, k * dilation // stride
            for t in range(frames):
                part = accumulator(0)
                part += load(weights[k]) * load(inputs[kept + t - shift])
                totals[t * stride + phase] += part
        to = (n * channels + c) * new_frames * stride
        for t in range(frames):
            if t < new_frames:
                for o in range(stride):
                    y[uint64(to + t * stride + o)] = store(totals[t * stride + o] if advances else accumulator(0))
        if advances:
            for f in range(kept):
                last = inputs[f + 1]
                for t in range(2, frames + 1):
                    last = inputs[f + t] if t <= new_frames else last
                state[uint64(row + f)] = last

    signature = signature_of(storage, types.int64, types.int64)
    return Kernel("streaming_depthwise", streaming_depthwise, signature, threads, key=repr(config))
