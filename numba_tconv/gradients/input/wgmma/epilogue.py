"""The epilogue of grad_input_wgmma: sums from registers into grad_input, or into the workspace of partial sums.

Lanes exchange sums, so that each stores four positions of one channel and a warp's sums of a channel are contiguous."""

from __future__ import annotations

import torch
from numba import cuda, int32, uint64

from numba_tconv.gradients.wgmma_ring import BLOCK
from numba_tconv.kernels.common.tensor_core.fragments import wgmma_d
from numba_tconv.ptx import bits_of, device_function, float_of, pack_bf16, pack_f16, repeated, st_global_if
from numba_tconv.runtime.elements import ELEMENTS

from .tile import Config


def make_store(config: Config):
    """A device function that stores a warpgroup's sums.

    ``target``: the element of the tile's first position and channel; ``length``: elements from a channel to the next;
    ``left``, ``positions``: channels and positions that exist from there on."""
    blocks, sums, halves = config.blocks, config.channels // 2, config.itemsize == 2 and not config.partial
    element, of_block = ELEMENTS[torch.float32 if config.partial else config.dtype], sums // 4
    store, place, store_words = element.store, device_function(wgmma_d), st_global_if(2 if halves else 4)
    pack = pack_f16 if config.precision == "fp16" else pack_bf16

    @device_function
    def gathered(low, high, lane, distance):
        """Exchange sums with the lane at ``distance``: both low sums in the earlier lane, both high ones in the later.

        The earlier lane's sum comes first."""
        later = lane & distance
        other = float_of(cuda.shfl_xor_sync(0xFFFFFFFF, bits_of(low if later else high), distance))
        return (other if later else low), (high if later else other)

    @device_function
    def store_four(k, state):
        """Store sums 4*k to 4*k + 3: columns n and n + 1 of rows m and m + 8, exchanged between four lanes.

        Each lane then has four positions of one channel; the lanes of a channel store 16 side by side."""
        acc, grad, at, eight, left, positions, lane = state
        z, words = 4 * k, cuda.local.array(4, dtype=int32)
        a0, a1 = gathered(acc[z], acc[z + 2], lane, 4)
        b0, b1 = gathered(acc[z + 1], acc[z + 3], lane, 4)
        v0, v2 = gathered(a0, b0, lane, 8)
        v1, v3 = gathered(a1, b1, lane, 8)
        if halves:
            words[0], words[1] = pack(v0, v1), pack(v2, v3)
        else:
            words[0], words[1], words[2], words[3] = bits_of(v0), bits_of(v1), bits_of(v2), bits_of(v3)
        exists = k % of_block * 8 < left and k // of_block * BLOCK < positions
        store_words(exists, grad, at + k % of_block * eight + k // of_block * BLOCK, words)

    @device_function
    def store_one(z, state):
        acc, grad, target, length, left, positions, group_warp, lane = state
        m, n = place(group_warp, lane, z % sums)
        m = int32(m + z // sums * BLOCK)
        if n < left and m < positions:
            grad[uint64(target + n * length + m)] = store(acc[z])

    store_fours, store_ones = repeated(store_four, blocks * of_block), repeated(store_one, blocks * sums)

    @device_function
    def store_tile(acc, grad, target, length, left, positions, group_warp, lane):
        if (length & 3) == 0:
            m, n = place(group_warp, lane & 3, 0)
            m, n = int32(m + (lane & 4) * 2 + (lane >> 4) * 4), int32(n + ((lane >> 3) & 1))
            at = target + n * length + m
            store_fours(int32(0), (acc, grad, at, 8 * length, int32(left - n), int32(positions - m), lane))
        else:
            store_ones(int32(0), (acc, grad, target, length, left, positions, group_warp, lane))

    return store_tile
