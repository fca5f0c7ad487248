"""k3: input window and weights in shared memory.

Idea: the threads of a block compute a tile of ``outputs`` x ``channels`` and all want the same few inputs and weights.
Let them fetch each once, together, into shared memory, convert it once, and read it from there with short addresses.
A thread computes ``per_thread`` output channels at one position, so that an input that it has read serves all of them.
What lies outside the signal is stored as zeros, so the inner loop runs over all taps of the phase without a bound.

Per multiply-add: 1 + 1/per_thread shared loads, where k2 has two loads through the caches; from global memory only
(window + channels * taps) / (outputs * channels) loads an output and input channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from numba import cuda, int32, int64, types, uint64

from ..elements import ELEMENTS
from ..launch import STATIC_SHARED_LIMIT, Kernel, flat, strided
from .rung import Rung, cuda_core_reason


@dataclass(frozen=True)
class Config:
    """The tile of a block: ``outputs`` consecutive output positions (threads of a warp) by ``channels``."""

    dtype: torch.dtype
    outputs: int = 64
    channels: int = 16
    per_thread: int = 4
    depth: int = 16  # input channels in shared memory at a time, at most

    @property
    def threads(self) -> int:
        return self.outputs * self.channels // self.per_thread


def window(problem, config) -> int:
    """Input positions that the outputs of one tile read."""
    last_shift = problem.taps.shift(problem.kernel_size - 1)
    return (config.outputs - 2) // problem.stride + 2 + last_shift


def bytes_a_channel(problem, config) -> int:
    """Shared memory for one input channel: its window, and its weights to the output channels of the tile."""
    elements = window(problem, config) + config.channels * problem.kernel_size
    return elements * ELEMENTS[config.dtype].accumulator.bitwidth // 8


def depth(problem, config) -> int:
    """Input channels that a block holds at a time: as many as fit, and no more than there are."""
    return min(config.depth, STATIC_SHARED_LIMIT // bytes_a_channel(problem, config), problem.in_channels_per_group)


@cache
def make_kernel(config: Config) -> Kernel:
    element = ELEMENTS[config.dtype]
    load, store, accumulator = element.load, element.store, element.accumulator
    outputs, channels, lanes = config.outputs, config.channels, min(32, config.threads)
    per_thread, warps = config.per_thread, config.threads // lanes

    def k3_shared_tile(
        x, x_n, x_c, x_l, w, w_i, w_o, w_k, bias, has_bias, y, length, in_per_group, out_per_group, taps,
        stride, padding, dilation, groups, gap, rows, step, inverse, out_length, width, depth,
    ):  # fmt: skip
        position_tiles = (out_length + outputs - 1) // outputs
        channel_tiles = (out_per_group + channels - 1) // channels

        # Tiles of one sample's window are neighbours in the grid, so the window is in L2 when the next one wants it.
        rest, channel_tile = divmod(int64(cuda.blockIdx.x), channel_tiles)
        rest, group = divmod(rest, groups)
        n, position_tile = divmod(rest, position_tiles)

        shared = cuda.shared.array(0, dtype=accumulator)
        weights = int32(depth * width)  # where the weights begin in it: (input channel, tap, output channel)
        w_channel = int32(channels * taps)
        thread = int32(cuda.threadIdx.x)
        m = int32(thread // outputs * per_thread)
        first_channel = channel_tile * channels

        first_output = position_tile * outputs
        o = first_output + thread % outputs
        block, phase = divmod(o + padding, stride)
        first_tap = int32(phase // gap * inverse % rows)
        own_taps = int32(0) if phase % gap else int32((taps - first_tap + rows - 1) // rows)
        window_begin = (first_output + padding) // stride + (outputs - 2) // stride + 2 - width
        newest = int32(block - first_tap * dilation // stride - window_begin)

        total = cuda.local.array(per_thread, dtype=accumulator)
        part = cuda.local.array(per_thread, dtype=accumulator)
        for j in range(per_thread):
            total[j] = accumulator(0)
        for c0 in range(0, in_per_group, depth):
            c = int32(thread // lanes)  # a warp loads a channel
            while c < depth:
                exists = c0 + c < in_per_group
                ci = group * in_per_group + c0 + c
                x_at = n * x_n + ci * x_c + window_begin * x_l
                w_at = ci * w_i + first_channel * w_o
                e = int32(thread % lanes)
                while e < width:
                    inside = exists and window_begin + e >= 0 and window_begin + e < length
                    shared[uint64(c * width + e)] = load(x[uint64(x_at + e * x_l)]) if inside else accumulator(0)
                    e = int32(e + lanes)
                e = int32(thread % lanes)
                while e < w_channel:
                    co, k = e // int32(taps), e % int32(taps)
                    inside = exists and first_channel + co < out_per_group
                    target = uint64(weights + c * w_channel + k * channels + co)
                    shared[target] = load(w[uint64(w_at + co * w_o + k * w_k)]) if inside else accumulator(0)
                    e = int32(e + lanes)
                c = int32(c + warps)
            cuda.syncthreads()
            for b in range(own_taps):
                xs = uint64(newest - b * step)
                ws = uint64(weights + (first_tap + b * rows) * channels + m)
                for j in range(per_thread):
                    part[j] = accumulator(0)
                for _ in range(int32(depth)):
                    value = shared[xs]
                    for j in range(per_thread):
                        part[j] += value * shared[ws + uint64(j)]
                    xs += uint64(width)
                    ws += uint64(w_channel)
                # Added up apart, because the error of a sum grows with its length.
                for j in range(per_thread):
                    total[j] += part[j]
            cuda.syncthreads()
        for j in range(per_thread):
            co = first_channel + m + j
            if co < out_per_group and o < out_length:
                co += group * out_per_group
                value = total[j] + load(bias[co]) if has_bias else total[j]
                y[uint64((n * groups * out_per_group + co) * out_length + o)] = store(value)

    stored, integers = element.storage, (types.int64,)
    tensors = flat(stored), *integers * 3, flat(stored), *integers * 3, strided(stored, 1), *integers, flat(stored)
    return Kernel("k3_shared_tile", k3_shared_tile, (*tensors, *integers * 15), config.threads, min_blocks=4)


class SharedTile(Rung):
    name = "k3_shared_tile"
    idea = "input window and weights in shared memory, one thread four output channels"

    def supports(self, problem, dtype, precision):
        reason = cuda_core_reason(dtype, precision)
        if reason is None and (need := bytes_a_channel(problem, Config(dtype))) > STATIC_SHARED_LIMIT:
            return f"one input channel needs {need} bytes of shared memory, of {STATIC_SHARED_LIMIT}"
        return reason

    def config(self, problem, dtype):
        return Config(dtype)

    def tiny_configs(self, problem, dtype):
        return [Config(dtype, 4, 4, 2, depth=2), Config(dtype, 8, 1, 1, depth=1)]

    def kernel(self, config):
        return make_kernel(config)

    def shared_bytes(self, problem, config):
        return depth(problem, config) * bytes_a_channel(problem, config)

    def run(self, x, w, bias, y, problem, config=None):
        config = config or self.config(problem, x.dtype)
        p, t = problem, problem.taps
        blocks = p.batch * -(-p.out_length // config.outputs) * p.groups
        blocks *= -(-p.out_channels_per_group // config.channels)
        self.kernel(config).launch(
            blocks,
            *(x, *x.stride(), w, *w.stride(), w[0, :, 0] if bias is None else bias, bias is not None, y),
            *(p.length, p.in_channels_per_group, p.out_channels_per_group, p.kernel_size),
            *(p.stride, p.padding, p.dilation, p.groups, t.gap, t.rows, t.step, t.dilation_inverse, p.out_length),
            *(window(problem, config), depth(problem, config)),
            shared_bytes=self.shared_bytes(problem, config),
        )
