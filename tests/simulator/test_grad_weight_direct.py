"""Sums stored as the weight's gradient, in the CUDA simulator: each where it belongs, nothing elsewhere."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numba import cuda

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.weight.wgmma import epilogue as grad_weight_direct
from numba_tconv.gradients.weight.wgmma.arguments import Block, Grid
from numba_tconv.gradients.weight.wgmma.tile import Config, Window
from numba_tconv.gradients.wgmma_ring import BLOCK, Consumer
from numba_tconv.kernels.common.tensor_core.fragments import wgmma_d
from tests.thorough import thorough

# Last tiles and channels partly filled; groups; more rows than pairs; two blocks of rows; tiles that begin within a
# channel.
PROBLEMS = {
    "two taps": (Problem(1, 20, 20, 16, 8, stride=8), 1, 2, 16, False),
    "four taps, groups, more rows than pairs": (Problem(1, 24, 40, 12, 8, stride=3, groups=2), 1, 4, 8, False),
    "two blocks": (Problem(1, 8, 40, 4, 8, stride=4), 2, 1, 8, False),
    "by taps": (Problem(1, 20, 24, 11, 8, stride=5), 1, 1, 8, True),
    "by taps, groups, two blocks": (Problem(1, 16, 80, 10, 8, stride=5, groups=2), 2, 1, 8, True),
}


@pytest.mark.parametrize("precision", thorough(["tf32", "bf16"], always=["bf16"]))
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_sum_is_stored_in_its_place(monkeypatch, name, precision):
    p, blocks, chunk, channels, by_taps = PROBLEMS[name]
    window = Window(p.stride, 1, p.kernel_size if by_taps else min(p.stride, p.kernel_size), 1, False)
    config = Config(precision, window, 1, 0, chunk, blocks, channels, False, stages=4, direct=True, by_taps=by_taps)
    assert grad_weight_direct.suits(p, config)
    check_store(monkeypatch, p, config, window.phases)


# Channels that the last tile does not fill; groups; tiles of half of a channel's phases, of all, of two blocks.
PLANES = {
    "half of the phases": (Problem(1, 12, 2, 512, 8, stride=256), 1, 2, 8),
    "all of them, groups": (Problem(1, 16, 4, 256, 8, stride=128, groups=2), 1, 2, 8),
    "two blocks": (Problem(1, 8, 3, 512, 8, stride=512), 2, 1, 8),
}


@pytest.mark.parametrize("precision", thorough(["tf32", "bf16"], always=["bf16"]))
@pytest.mark.parametrize("name", PLANES)
def test_every_sum_of_planes_is_stored_in_its_place(monkeypatch, name, precision):
    p, blocks, chunk, channels = PLANES[name]
    tile = Config(precision, Window(1, 1, 1, 1, False), 1, 0, chunk, blocks, channels, False, stages=4)
    assert grad_weight_direct.planes_suit(p, tile, p.stride)
    check_store(monkeypatch, p, replace(tile, direct=True, plane_phases=p.stride), p.stride)


def check_store(monkeypatch, p, config, phases):
    """``phases``: of an output channel, which a tile has some or all of."""
    monkeypatch.setattr(grad_weight_direct, "barrier_sync", lambda barrier, threads: cuda.syncthreads())
    store_sums = grad_weight_direct.make_store(config)
    blocks, chunk, channels = config.blocks, config.tap_chunk, config.channels
    taps, pair_tiles, channel_tiles = config.tiles_of(p)
    assert taps == 1
    words = channels * grad_weight_direct.pitch_of(config)
    group_rows, group_channels, sums = p.out_channels_per_group, p.in_channels_per_group, channels // 2
    rows = group_rows * (phases if config.plane_phases else 1)

    @cuda.jit
    def kernel(weight, result):
        shared = cuda.shared.array(words, dtype=np.float32)
        thread, block = cuda.threadIdx.x, cuda.blockIdx.x
        crew, warp, lane = thread // 128, thread % 128 // 32, thread % 32
        rest, channel_tile = divmod(block, channel_tiles)
        group, pair_tile = divmod(rest, pair_tiles)
        acc = np.full(config.sums, np.nan, np.float32)
        for at in range(config.sums):
            block_and_tap, z = divmod(at, sums)
            m, n = wgmma_d(warp, lane, z)
            row = m + BLOCK * (blocks * crew + block_and_tap // chunk)
            co, phase = divmod(pair_tile * config.pairs + row, phases)
            c = channel_tile * channels + n
            if row < config.pairs and co < group_rows and c < group_channels:
                acc[at] = weight[group * group_channels + c, co, block_and_tap % chunk * phases + phase]
        grid = Grid(rows, group_channels, pair_tiles, channel_tiles, 1, 0, 0, 0, 1)
        block = Block(0, 0, group, pair_tile, channel_tile)
        staging = grad_weight_direct.Staging(shared, 0)
        store_sums(acc, result, staging, grid, block, Consumer(crew, warp, lane))

    dtype = torch.float32 if config.precision == "tf32" else torch.bfloat16
    weight = torch.randn(p.in_channels, group_rows, p.kernel_size).to(dtype)
    result = torch.full(weight.shape, torch.nan, dtype=dtype)
    bits = result if dtype == torch.float32 else result.view(torch.uint16)
    kernel[p.groups * pair_tiles * channel_tiles, grad_weight_direct.THREADS](
        weight.float().numpy(), bits.flatten().numpy()
    )
    assert torch.equal(result, weight)


@pytest.mark.parametrize("phases", [1, 2, 4, 8])
def test_what_a_warp_writes_at_once_lies_in_different_banks(phases):
    window = Window(phases, 1, phases, 1, False)
    config = replace(Config("bf16", window, 1, 0, 2, 1, 64, False), stages=4)
    pitch = grad_weight_direct.pitch_of(config)
    places = set()
    for lane in range(32):
        m, n = wgmma_d(0, lane, 0)
        places.add((n * pitch + m // phases * 2 * phases + m % phases) % 32)
    assert len(places) >= (32 if phases == 8 else 16)
