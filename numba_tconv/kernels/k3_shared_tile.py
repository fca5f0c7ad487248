"""k3: input window and weights in shared memory.

A block fetches the inputs and weights of ``outputs`` x ``channels`` once, converted. A thread computes all ``channels``
at one position. With zeros outside the signal, the loop over taps needs no bound.

Measured (H200, kb64, float32): 33.7 ms, 4.6 times k2."""

from dataclasses import dataclass
from functools import cache

import torch
from numba import cuda, int32, int64, types, uint32, uint64

from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import STATIC_SHARED_LIMIT, Kernel, flat, strided

from .common.arguments import Bias, Layer, Signal, Weights, arguments, layer_of
from .rung import Rung, adjacent

FEW_CHANNELS = 16
MIN_DEPTH = 4  # below, fetching weights outlasts multiplying


@dataclass(frozen=True)
class Config:
    """A block's ``outputs`` positions, one a thread, by ``channels``."""

    dtype: torch.dtype
    outputs: int = 256
    channels: int = 8
    depth: int = 32  # most input channels of a stage

    @property
    def pitch(self) -> int:
        """Weights between taps: odd, against bank conflicts."""
        return self.channels // 2 * 2 + 1


def window(problem, config) -> int:
    last_shift = problem.taps.shift(problem.kernel_size - 1)
    return (config.outputs - 2) // problem.stride + 2 + last_shift


def bytes_a_channel(problem, config) -> int:
    elements = window(problem, config) + config.pitch * problem.kernel_size
    return elements * ELEMENTS[config.dtype].accumulator.bitwidth // 8


def depth(problem, config) -> int:
    return min(config.depth, STATIC_SHARED_LIMIT // bytes_a_channel(problem, config), problem.in_channels_per_group)


@cache
def make_kernel(config: Config) -> Kernel:
    element = ELEMENTS[config.dtype]
    load, store, accumulator = element.load, element.store, element.accumulator
    outputs, channels, pitch = config.outputs, config.channels, config.pitch

    def k3_shared_tile(x, w, bias, y, layer, width, depth):
        position_tiles = (layer.out_length + outputs - 1) // outputs
        channel_tiles = (layer.out_per_group + channels - 1) // channels

        # Neighbours share a window in L2.
        window_tile, channel_tile = divmod(int64(cuda.blockIdx.x), channel_tiles)
        window_tile, group = divmod(window_tile, layer.groups)
        n, position_tile = divmod(window_tile, position_tiles)

        shared = cuda.shared.array(0, dtype=accumulator)
        taps, width, depth = int32(layer.taps), int32(width), int32(depth)
        weights = int32(depth * width)  # by input channel, tap, output channel
        w_channel = int32(taps * pitch)
        thread = int32(cuda.threadIdx.x)
        first_channel = channel_tile * channels

        first_output = position_tile * outputs
        o = first_output + thread
        block, phase = divmod(o + layer.padding, layer.stride)
        first_tap = int32(phase // layer.gap * layer.inverse % layer.rows)
        phase_taps = int32(0) if phase % layer.gap else int32((taps - first_tap + layer.rows - 1) // layer.rows)
        window_begin = (first_output + layer.padding) // layer.stride + (outputs - 2) // layer.stride + 2 - width
        newest = int32(block - first_tap * layer.dilation // layer.stride - window_begin)

        x_offset = n * x.stride_n + group * layer.in_per_group * x.stride_c
        w_offset = group * layer.in_per_group * w.stride_i + first_channel * w.stride_o
        w_elements = int32(min(channels, layer.out_per_group - first_channel) * taps)
        total = cuda.local.array(channels, dtype=accumulator)
        part = cuda.local.array(channels, dtype=accumulator)
        for j in range(channels):
            total[j] = accumulator(0)
        for first in range(0, layer.in_per_group, depth):
            stage_channels = int32(min(depth, layer.in_per_group - first))
            e = thread
            while e < width:
                i = window_begin + e
                inside = i >= 0 and i < layer.length
                source, target = x_offset + (i * x.stride_l if inside else int64(0)), e
                for _ in range(stage_channels):
                    value = load(x.data[uint64(source)])
                    shared[uint64(target)] = value if inside else accumulator(0)
                    source, target = source + x.stride_c, int32(target + width)
                e = int32(e + outputs)
            e = int32(outputs - 1 - thread)  # threads that fetched less come first
            while e < w_elements:
                co = int32(uint32(e) // uint32(taps))
                k = int32(e - co * taps)
                source, target = w_offset + co * w.stride_o + k * w.stride_k, int32(weights + k * pitch + co)
                for _ in range(stage_channels):
                    shared[uint64(target)] = load(w.data[uint64(source)])
                    source, target = source + w.stride_i, int32(target + w_channel)
                e = int32(e + outputs)
            x_offset, w_offset = x_offset + stage_channels * x.stride_c, w_offset + stage_channels * w.stride_i
            cuda.syncthreads()
            for b in range(phase_taps):
                xs = uint64(newest - b * layer.step)
                ws = uint64(weights + (first_tap + b * layer.rows) * pitch)
                for j in range(channels):
                    part[j] = accumulator(0)
                c = int32(0)
                while c < stage_channels:
                    value = shared[xs]
                    for j in range(channels):
                        part[j] += value * shared[ws + uint64(j)]
                    xs += uint64(width)
                    ws += uint64(w_channel)
                    c = int32(c + 1)
                # Long sums lose digits.
                for j in range(channels):
                    total[j] += part[j]
            cuda.syncthreads()
        for j in range(channels):
            co = first_channel + j
            if co < layer.out_per_group and o < layer.out_length:
                co += group * layer.out_per_group
                value = total[j] + load(bias.data[co]) if bias.exists else total[j]
                y[uint64((n * layer.groups * layer.out_per_group + co) * layer.out_length + o)] = store(value)

    stored = element.storage
    x, w = arguments(Signal, data=flat(stored)), arguments(Weights, data=flat(stored))
    tensors = x, w, arguments(Bias, data=strided(stored, 1)), flat(stored)
    signature = (*tensors, arguments(Layer), types.int64, types.int64)
    min_blocks = min(32, 1024 // outputs)  # 64 registers a thread
    return Kernel("k3_shared_tile", k3_shared_tile, signature, outputs, min_blocks=min_blocks, key=repr(config))


class SharedTile(Rung):
    name = "k3_shared_tile"
    idea = "input window and weights in shared memory, one thread eight output channels"
    make_kernel = staticmethod(make_kernel)

    def supports(self, problem, dtype, precision):
        if reason := super().supports(problem, dtype, precision):
            return reason
        channels = min(MIN_DEPTH, problem.in_channels_per_group)
        need = channels * bytes_a_channel(problem, self.config(problem, dtype))
        if need > STATIC_SHARED_LIMIT:
            return f"{channels} input channels need {need} bytes of shared memory, of {STATIC_SHARED_LIMIT}"
        return None

    def unsuited(self, problem, dtype, precision, device):
        if (channels := problem.out_channels_per_group) < FEW_CHANNELS:
            return f"it is for at least {FEW_CHANNELS} output channels a group, not {channels}: most of a tile is empty"
        return None

    def config(self, problem, dtype, precision=None):
        return Config(dtype, channels=4 if dtype == torch.float64 else 8)

    def tile(self, config):
        return f"{config.outputs} positions of {config.channels} output channels, one position a thread"

    def tiny_configs(self, problem, dtype):
        return [Config(dtype, 16, 2, depth=2), Config(dtype, 8, 1, depth=1)]

    def shared_bytes(self, problem, config):
        return depth(problem, config) * bytes_a_channel(problem, config)

    def run(self, x, w, bias, y, problem, config=None, precision=None):
        config, x = config or self.config(problem, x.dtype), adjacent(x)
        p = problem
        blocks = p.batch * -(-p.out_length // config.outputs) * p.groups
        blocks *= -(-p.out_channels_per_group // config.channels)
        self.kernel(config).launch(
            blocks,
            Signal(x, *x.stride()),
            Weights(w, *w.stride()),
            Bias(w[0, :, 0] if bias is None else bias, bias is not None),
            y,
            layer_of(p),
            window(p, config),
            depth(p, config),
            shared_bytes=self.shared_bytes(problem, config),
        )
