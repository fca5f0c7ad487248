"""Weights in the order of the tensor-core rungs, in the CUDA simulator: every place holds its own weight, or zero.

Needs NUMBA_ENABLE_CUDASIM=1 from the start of the process (`make test`).
"""

import contextlib
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from numba_tconv.kernels import packed_weights, tensor_pack, tensor_pack_pairs, tensor_pack_split
from numba_tconv.kernels.fragments import mma_a, split_channel, wgmma_b
from numba_tconv.kernels.tensor_tile import make_tile
from numba_tconv.launch import Kernel
from numba_tconv.layout import Layout
from numba_tconv.problem import Problem
from numba_tconv.ptx import SIMULATOR, round_tf32
from tests.few_blocks import few_threads

pytestmark = pytest.mark.skipif(not SIMULATOR, reason="needs NUMBA_ENABLE_CUDASIM=1")

# Phases side by side, one without the last tap; groups; more taps than a chunk; parts of a long stride; a row of taps;
# and of those whose taps go by twos, ones with two taps a row, with groups, and with phases that have one tap less.
PROBLEMS = {
    "phases": Problem(1, 18, 5, 5, 8, stride=2),
    "rows to fill up": Problem(1, 9, 5, 5, 8, stride=5),
    "groups": Problem(1, 18, 10, 2, 8, groups=2),
    "chunks of taps": Problem(1, 8, 3, 9, 8, dilation=3),
    "parts of a stride": Problem(1, 9, 1, 102, 8, stride=100),
    "single rows": Problem(1, 9, 3, 5, 8, stride=12, dilation=18),
    "pairs": Problem(1, 18, 5, 8, 8, stride=4),
    "pairs in groups": Problem(1, 18, 14, 4, 8, stride=2, groups=2),
    "pairs, a short row": Problem(1, 18, 3, 6, 8, stride=4),
}
BY_PAIRS = ["parts of a stride", "pairs", "pairs in groups", "pairs, a short row"]


@pytest.fixture(autouse=True)
def tiny_blocks():
    modules = tensor_pack, tensor_pack_pairs, tensor_pack_split
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(few_threads(module, 12, packed_weights._made))
        yield


def place_of(order, rows, itemsize, row, k):
    """Where in a tap's block the weight of a row of the tile and of a channel stands."""
    if order == "wgmma":
        return wgmma_b(row, k, rows, 16 // itemsize)
    halves = 4 // itemsize
    for lane, i, h in itertools.product(range(32), range(4), range(halves)):
        if mma_a(lane, i, h, halves) == (row % 16, k):
            return ((row // 16 * 32 + lane) * 4 + i) * halves + h
    raise AssertionError


def expected(w, problem, tile, order, channel_chunks, scale=1):
    p, row_tiles = problem, tile.row_tiles(problem)
    places = [tile.tap_chunks(p), channel_chunks, tile.parts, tile.tap_chunk]
    block = tile.rows * tile.depth
    packed = np.zeros((p.groups, row_tiles, *places, block), np.float32)
    rows, depth = range(tile.channels * tile.phases), range(tile.depth)
    inside = {mk: place_of(order, tile.rows, tile.operand_size, *mk) for mk in itertools.product(rows, depth)}
    for *at, tap in np.ndindex(packed.shape[:-1]):
        group, row_tile, tap_chunk, chunk, part = at
        for (m, k), place in inside.items():
            of_stage = split_channel(k) if tile.parts == 2 else k
            c, co = chunk * tile.depth + of_stage, row_tile // tile.row_parts * tile.channels + m // tile.phases
            row = row_tile % tile.row_parts * tile.phases + m % tile.phases
            t = row + (tap_chunk * tile.tap_chunk + tap) * tile.taps.rows
            if c < p.in_channels_per_group and co < w.shape[1] and row < tile.taps.rows and t < p.kernel_size:
                value = np.float32(w[group * p.in_channels_per_group + c, co, t])
                if tile.parts == 2:
                    high = np.float16(value * scale)
                    value = np.float16(value * scale - np.float32(high)) if part else high
                packed[(*at, tap, place)] = round_tf32(value) if tile.kind == "tf32" else value
    return packed.flatten()


def tile_of(problem, precision, order):
    tile = make_tile(problem, precision, 16)
    if order == "mma":
        return replace(tile, channels=16 // math.gcd(16, tile.phases))  # k5's tiles are of whole sixteens of rows
    return tile


@pytest.mark.parametrize(
    ("order", "precision"), [("wgmma", "tf32"), ("wgmma", "bf16"), ("mma", "tf32"), ("mma", "fp16")]
)
@pytest.mark.parametrize("what", PROBLEMS)
def test_every_weight_is_in_its_place(what, order, precision):
    problem = PROBLEMS[what]
    tile = tile_of(problem, precision, order)
    chunks = tile.channel_chunks(problem) + 1  # one more than there are channels for, as loops that are unrolled have
    w = torch.randn(problem.in_channels, problem.out_channels_per_group, problem.kernel_size).to(tile.dtype)
    packing = tensor_pack.packing_of(problem, tile, order, chunks, Layout.of(w))
    packed = torch.full((packing.size,), torch.nan, dtype=tile.dtype)
    packing.launch(w, packed)
    assert np.array_equal(packed.float().numpy(), expected(w.float().numpy(), problem, tile, order, chunks))


def packed_in_parts(w, problem, order):
    """The two parts of all stages, and the inverse of the scale; tile and stages of a tap chunk."""
    tile = tile_of(problem, "tf32x3", order)
    chunks = tile.channel_chunks(problem) + 1
    packing = tensor_pack.packing_of(problem, tile, order, chunks, Layout.of(w))
    packed = torch.full((packing.size,), torch.nan)
    packing.launch(w, packed)
    parts = packed[:-4].view(torch.float16).float().view(-1, 2, tile.tap_chunk * tile.rows * tile.depth).transpose(0, 1)
    return parts.numpy(), packed[-1].item(), tile, chunks


@pytest.mark.parametrize("order", ["wgmma", "mma"])
@pytest.mark.parametrize("what", PROBLEMS)
def test_both_parts_of_every_weight_are_in_their_places(what, order):
    problem = PROBLEMS[what]
    w = torch.randn(problem.in_channels, problem.out_channels_per_group, problem.kernel_size) * 1e-12
    packed, inverse, tile, chunks = packed_in_parts(w, problem, order)
    assert 2**14 <= w.abs().max() / inverse < 2**15
    assert math.log2(inverse).is_integer()
    wanted = expected(w.numpy(), problem, tile, order, chunks, np.float32(1 / inverse))
    assert np.array_equal(packed.transpose(1, 0, 2).flatten(), wanted)


@pytest.mark.parametrize("what", [math.inf, -math.inf, math.nan])
def test_weights_beside_what_is_no_number_have_a_scale(what):
    """That of the largest number; an infinity has one part."""
    problem = PROBLEMS["phases"]
    w = torch.full((problem.in_channels, problem.out_channels_per_group, problem.kernel_size), 3e20)
    w[1, 2, 3] = what
    packed, inverse, *_ = packed_in_parts(w, problem, "wgmma")
    assert inverse == 2.0 ** (math.floor(math.log2(3e20)) - 14)
    larger, smaller = packed
    assert np.array_equal(larger[~np.isfinite(larger)], [what], equal_nan=True)
    assert np.isfinite(smaller[np.isfinite(larger)]).all()
    assert math.isnan(what) or not smaller[np.isinf(larger)].any()


@pytest.mark.parametrize("largest", [0, 1e-45, 1e-38])
def test_the_least_weights_have_a_scale(largest):
    problem = PROBLEMS["phases"]
    w = torch.full((problem.in_channels, problem.out_channels_per_group, problem.kernel_size), float(largest))
    packed, inverse, *_ = packed_in_parts(w, problem, "wgmma")
    assert inverse == 2.0**-126
    larger, smaller = packed
    exact = w.max().item()
    assert larger.max() == np.float16(exact / inverse)
    assert abs((larger + smaller).max() * inverse - exact) <= max(2.0**-22 * exact, 2.0**-25 * inverse)


@pytest.mark.parametrize("what", BY_PAIRS)
def test_pairs_are_taken_where_they_lie_so(monkeypatch, what):
    """Not of weights that begin at an odd element, nor of those that lie otherwise; the result is the same."""
    problem, launched = PROBLEMS[what], []
    tile = make_tile(problem, "fp16", 16)
    chunks = tile.channel_chunks(problem)
    sizes = problem.in_channels, problem.out_channels_per_group, problem.kernel_size
    run = Kernel.launch

    def launch(kernel, *arguments, **others):
        launched.append(kernel.name)
        run(kernel, *arguments, **others)

    monkeypatch.setattr(Kernel, "launch", launch)
    storage = torch.randn(math.prod(sizes) + 1).to(tile.dtype)
    strided = torch.randn(*sizes[:2], 2 * sizes[2]).to(tile.dtype)[:, :, ::2]
    for w, name in (
        (storage[:-1].view(sizes), "pack_pairs"),
        (storage[1:].view(sizes), "pack_weights"),
        (strided, "pack_weights"),
    ):
        packing = tensor_pack.packing_of(problem, tile, "wgmma", chunks, Layout.of(w))
        packed = torch.full((packing.size,), torch.nan, dtype=tile.dtype)
        packing.launch(w, packed)
        assert launched.pop() == name
        wanted = expected(w.float().numpy(), problem, tile, "wgmma", chunks)
        assert np.array_equal(packed.float().numpy(), wanted)


def test_odd_sizes_are_packed_one_by_one():
    for what, problem in PROBLEMS.items():
        for precision in ("bf16", "tf32"):
            tile = make_tile(problem, precision, 16)
            (kernel,) = tensor_pack.kernels_of(problem, tile, "wgmma")
            assert (kernel.name == "pack_pairs") == (what in BY_PAIRS and precision == "bf16")
