"""Store into grad_input, or partial sums."""

from typing import NamedTuple

import torch
from numba import cuda, int32, int64, uint64

from numba_tconv.gradients.wgmma_ring import BLOCK
from numba_tconv.kernels.common.tensor_core.fragments import wgmma_d
from numba_tconv.ptx import bits_of, device_function, float_of, pack_bf16, pack_f16, repeated, st_global_if
from numba_tconv.runtime.elements import ELEMENTS

from .tile import Config


class Target(NamedTuple):
    start: int
    length: int
    channels_left: int
    positions_left: int


def make_aim(config: Config):
    channels, positions, split_k = config.channels, config.rows, config.split_k
    warpgroup_rows = config.warpgroup_rows

    @device_function
    def aim(tile, shape, splits, warpgroup):
        position = int32(tile.position + warpgroup_rows * warpgroup)
        channel = int64(tile.group) * shape.group_channels + tile.channel_tile * channels
        start = (int64(tile.sample) * (shape.groups * shape.group_channels) + channel) * shape.length + position
        if split_k:
            channel = ((int64(tile.sample) * shape.groups + tile.group) * splits + tile.split) * shape.group_channels
            start = (channel + tile.channel_tile * channels) * shape.length + position
        channels_left = int32(shape.group_channels - tile.channel_tile * channels)
        return Target(start, shape.length, channels_left, int32(min(shape.length - position, int64(positions))))

    return aim


class Stored(NamedTuple):
    sums: object
    grad: object
    to: Target
    warp: int
    lane: int


def make_store(config: Config):
    blocks, sums_of_block, halves = config.blocks, config.channels // 2, config.itemsize == 2 and not config.split_k
    element, fours = ELEMENTS[torch.float32 if config.split_k else config.dtype], sums_of_block // 4
    store, fragment, store_words = element.store, device_function(wgmma_d), st_global_if(2 if halves else 4)
    pack = pack_f16 if config.precision == "fp16" else pack_bf16

    @device_function
    def gathered(low, high, lane, distance):
        """Exchange with the lane at ``distance``: the earlier lane gets both low sums, the later both high ones, the
        earlier's first."""
        later = lane & distance
        other = float_of(cuda.shfl_xor_sync(0xFFFFFFFF, bits_of(low if later else high), distance))
        return (other if later else low), (high if later else other)

    @device_function
    def store_four(k, state):
        """Store sums 4*k to 4*k + 3: columns n, n + 1 of rows m, m + 8, exchanged between four lanes.

        Each lane then has four positions of a channel, and four lanes store 16 side by side."""
        sums, to, lane = state.sums, state.to, state.lane
        z, words = 4 * k, cuda.local.array(4, dtype=int32)
        a0, a1 = gathered(sums[z], sums[z + 2], lane, 4)
        b0, b1 = gathered(sums[z + 1], sums[z + 3], lane, 4)
        v0, v2 = gathered(a0, b0, lane, 8)
        v1, v3 = gathered(a1, b1, lane, 8)
        if halves:
            words[0], words[1] = pack(v0, v1), pack(v2, v3)
        else:
            words[0], words[1], words[2], words[3] = bits_of(v0), bits_of(v1), bits_of(v2), bits_of(v3)
        exists = k % fours * 8 < to.channels_left and k // fours * BLOCK < to.positions_left
        store_words(exists, state.grad, to.start + k % fours * (8 * to.length) + k // fours * BLOCK, words)

    @device_function
    def store_one(z, state):
        to = state.to
        m, n = fragment(state.warp, state.lane, z % sums_of_block)
        m = int32(m + z // sums_of_block * BLOCK)
        if n < to.channels_left and m < to.positions_left:
            state.grad[uint64(to.start + n * to.length + m)] = store(state.sums[z])

    store_fours, store_ones = repeated(store_four, blocks * fours), repeated(store_one, blocks * sums_of_block)

    @device_function
    def store_tile(sums, grad, to, warp, lane):
        if (to.length & 3) == 0:
            m, n = fragment(warp, lane & 3, 0)
            m, n = int32(m + (lane & 4) * 2 + (lane >> 4) * 4), int32(n + ((lane >> 3) & 1))
            first = to.start + n * to.length + m
            lanes = Target(first, to.length, int32(to.channels_left - n), int32(to.positions_left - m))
            store_fours(int32(0), Stored(sums, grad, lanes, warp, lane))
        else:
            store_ones(int32(0), Stored(sums, grad, to, warp, lane))

    return store_tile
