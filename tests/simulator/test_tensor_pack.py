"""Weights in the tensor-core rungs' order, in the CUDA simulator: each slot holds its weight, or zero."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common import packed_weights, weight_box
from numba_tconv.kernels.common.tensor_core import largest
from numba_tconv.kernels.common.tensor_core import pack as tensor_pack
from numba_tconv.kernels.common.tensor_core.fragments import mma_a, split_channel, wgmma_b
from numba_tconv.kernels.common.tensor_core.tile import make_tile
from numba_tconv.kernels.common.weight_box import ALONG_CHANNELS, ALONG_PHASES, ELEMENTWISE
from numba_tconv.ptx import round_tf32
from numba_tconv.ptx.simulator.meanings import address
from numba_tconv.runtime.layout import Layout
from tests.few_blocks import few_threads
from tests.thorough import thorough

# Phases side by side, one without the last tap; groups; more taps than a chunk; a share of a long stride; a row of
# taps; and with an even number of taps: two a row, groups, and phases with one less.
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


@pytest.fixture(autouse=True)
def tiny_blocks():
    with (
        few_threads(tensor_pack, 12, tensor_pack.make_split_kernel, packed_weights._made),
        few_threads(largest, 5),
    ):
        yield


def place_of(order, rows, itemsize, row, k):
    """A weight's position in a tap's block, by row of the tile and channel."""
    if order == "wgmma":
        return wgmma_b(row, k, rows, 16 // itemsize)
    halves = 4 // itemsize
    for lane, i, h in itertools.product(range(32), range(4), range(halves)):
        if mma_a(lane, i, h, halves) == (row % 16, k):
            return ((row // 16 * 32 + lane) * 4 + i) * halves + h
    raise AssertionError


def expected(w, problem, tile, order, channel_chunks, scale=1):
    p, row_tiles = problem, tile.row_tiles(problem)
    places = [tile.tap_chunks(p), channel_chunks, tile.operand_halves, tile.tap_chunk]
    block = tile.rows * tile.depth
    packed = np.zeros((p.groups, row_tiles, *places, block), np.float32)
    rows, depth = range(tile.channels * tile.phases), range(tile.depth)
    inside = {mk: place_of(order, tile.rows, tile.operand_size, *mk) for mk in itertools.product(rows, depth)}
    for *at, tap in np.ndindex(packed.shape[:-1]):
        group, row_tile, tap_chunk, chunk, part = at
        for (m, k), place in inside.items():
            of_stage = split_channel(k) if tile.operand_halves == 2 else k
            c, co = chunk * tile.depth + of_stage, row_tile // tile.row_parts * tile.channels + m // tile.phases
            row = row_tile % tile.row_parts * tile.phases + m % tile.phases
            t = row + (tap_chunk * tile.tap_chunk + tap) * tile.taps.rows
            if c < p.in_channels_per_group and co < w.shape[1] and row < tile.taps.rows and t < p.kernel_size:
                value = np.float32(w[group * p.in_channels_per_group + c, co, t])
                if tile.operand_halves == 2:
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
    ("order", "precision"),
    thorough(
        [("wgmma", "tf32"), ("wgmma", "bf16"), ("mma", "tf32"), ("mma", "fp16")],
        always=[("wgmma", "bf16"), ("mma", "tf32")],
    ),
)
@pytest.mark.parametrize("what", thorough(PROBLEMS, always=[*PROBLEMS][::2]))
def test_every_weight_is_in_its_place(what, order, precision):
    problem = PROBLEMS[what]
    tile = tile_of(problem, precision, order)
    chunks = tile.channel_chunks(problem) + 1  # one more than there are channels for, as unrolled loops have
    w = torch.randn(problem.weight_shape).to(tile.dtype)
    packing = tensor_pack.packing_of(problem, tile, order, chunks, Layout.of(w))
    packed = torch.full((packing.size,), torch.nan, dtype=tile.dtype)
    packing.launch(w, packed)
    assert np.array_equal(packed.float().numpy(), expected(w.float().numpy(), problem, tile, order, chunks))


def packed_in_parts(w, problem, order):
    """The two halves of all stages, and the inverse of the scale; tile and stages of a tap chunk."""
    tile = tile_of(problem, "tf32x3", order)
    chunks = tile.channel_chunks(problem) + 1
    packing = tensor_pack.packing_of(problem, tile, order, chunks, Layout.of(w))
    packed = torch.full((packing.size,), torch.nan)
    packing.launch(w, packed)
    parts = packed[:-4].view(torch.float16).float().view(-1, 2, tile.tap_chunk * tile.rows * tile.depth).transpose(0, 1)
    return parts.numpy(), packed[-1].item(), tile, chunks


@pytest.mark.parametrize(
    ("what", "order"),
    thorough(
        itertools.product(PROBLEMS, ["wgmma", "mma"]),
        always=[*((what, "wgmma") for what in [*PROBLEMS][::2]), *((what, "mma") for what in [*PROBLEMS][::4])],
    ),
)
def test_both_parts_of_every_weight_are_in_their_places(what, order):
    problem = PROBLEMS[what]
    w = torch.randn(problem.weight_shape) * 1e-12
    packed, inverse, tile, chunks = packed_in_parts(w, problem, order)
    assert 2**14 <= w.abs().max() / inverse < 2**15
    assert math.log2(inverse).is_integer()
    wanted = expected(w.numpy(), problem, tile, order, chunks, np.float32(1 / inverse))
    assert np.array_equal(packed.transpose(1, 0, 2).flatten(), wanted)


@pytest.mark.parametrize("what", [math.inf, -math.inf, math.nan])
def test_weights_beside_what_is_no_number_have_a_scale(what):
    """The largest number's; an infinity has one half."""
    problem = PROBLEMS["phases"]
    w = torch.full(problem.weight_shape, 3e20)
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
    w = torch.full(problem.weight_shape, float(largest))
    packed, inverse, *_ = packed_in_parts(w, problem, "wgmma")
    assert inverse == 2.0**-126
    larger, smaller = packed
    exact = w.max().item()
    assert larger.max() == np.float16(exact / inverse)
    assert abs((larger + smaller).max() * inverse - exact) <= max(2.0**-22 * exact, 2.0**-25 * inverse)


# Weights that 16-byte copies bring, and neighbours that differ in one thing: a box's layout, the precision.
W_C, W_O = 640, 20  # strides of weights in larger memory
WAYS = {
    "along channels": (Problem(1, 18, 24, 3, 8), "tf32", None, ALONG_CHANNELS),
    "along channels, by halves": (Problem(1, 18, 8, 8, 8, stride=4), "bf16", None, ALONG_CHANNELS),
    "along channels, the last tile's end inside a vector": (
        Problem(1, 8, 18, 3, 8),
        "bf16",
        (72, 3, 1),
        ALONG_CHANNELS,
    ),
    "along channels, which begin anywhere": (Problem(1, 9, 5, 5, 8), "tf32", None, ELEMENTWISE),
    "along channels, apart": (Problem(1, 18, 24, 3, 8), "tf32", (W_C, 4, 1), ELEMENTWISE),
    "along channels, in chunks of taps": (Problem(1, 8, 8, 9, 8, dilation=3), "tf32x3", None, ELEMENTWISE),
    "along channels, fewer taps than the stride": (Problem(1, 8, 8, 2, 8, stride=5), "tf32", None, ALONG_CHANNELS),
    "along channels, dilated": (Problem(1, 8, 4, 8, 8, stride=12, dilation=18), "tf32", None, ALONG_CHANNELS),
    "along phases": (Problem(1, 18, 5, 16, 8, stride=8), "tf32", None, ALONG_PHASES),
    "along phases, by halves": (Problem(1, 18, 3, 16, 8, stride=8), "fp16", None, ALONG_PHASES),
    "along phases, of parts": (Problem(1, 9, 2, 96, 8, stride=48), "bf16", None, ALONG_PHASES),
    "along phases, apart": (Problem(1, 18, 5, 16, 8, stride=8), "tf32", (W_C, W_O, 1), ALONG_PHASES),
    "along phases, which begin anywhere": (Problem(1, 18, 5, 16, 8, stride=8), "tf32", (W_C, W_O - 2, 1), ELEMENTWISE),
    "along phases, channels anywhere": (Problem(1, 18, 5, 16, 8, stride=8), "tf32", (W_C + 2, W_O, 1), ELEMENTWISE),
    "along phases, the last ones' end": (Problem(1, 18, 5, 18, 8, stride=8), "tf32", (W_C, W_O, 1), ELEMENTWISE),
    "along phases, taps apart": (Problem(1, 18, 5, 16, 8, stride=8), "tf32", (W_C, 32, 2), ELEMENTWISE),
    "an odd stride, an even kernel": (Problem(1, 18, 2, 260, 8, stride=129), "bf16", None, ELEMENTWISE),
}


@pytest.fixture
def copied(monkeypatch):
    """The first element of every copied vector, which must lie at a multiple of 16 bytes."""
    begins, cp_async = [], weight_box.cp_async

    def checked(elements):
        copy = cp_async(elements)

        def copy_checked(shared, s, source, g, valid):
            size = elements * source.itemsize
            assert size == 16
            assert (address(source, g) % size, s * shared.itemsize % size) == (0, 0)
            assert 0 <= g <= source.size - elements
            assert s + elements <= shared.size
            begins.append(g)
            copy(shared, s, source, g, valid)

        return copy_checked

    monkeypatch.setattr(weight_box, "cp_async", checked)
    return begins


def weights(problem, dtype, strides=None, offset=0):
    """Random ones, ``strides`` apart, ``offset`` elements past a multiple of 16 bytes."""
    sizes = problem.weight_shape
    strides = strides or (sizes[1] * sizes[2], sizes[2], 1)
    memory = torch.randn(1 + offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))).to(dtype)
    assert memory.data_ptr() % 16 == 0
    return memory.as_strided(sizes, strides, offset)


@pytest.mark.parametrize("order", ["wgmma", "mma"])
@pytest.mark.parametrize("what", thorough(WAYS, always=[*WAYS][::3]))
def test_vectors_are_copied_where_weights_lie_so(copied, what, order):
    problem, precision, strides, way = WAYS[what]
    tile = tile_of(problem, precision, order)
    w, chunks = weights(problem, tile.dtype, strides), tile.channel_chunks(problem)
    assert tensor_pack.box_of(tile).way(Layout.of(w), tile.whole and not tile.several_chunks) == way
    packing = tensor_pack.packing_of(problem, tile, order, chunks, Layout.of(w))
    packed = torch.full((packing.size,), torch.nan, dtype=tile.dtype)
    packing.launch(w, packed)
    assert (len(copied) > 0) == (way != ELEMENTWISE)
    if tile.operand_halves == 1:
        assert np.array_equal(packed.float().numpy(), expected(w.float().numpy(), problem, tile, order, chunks))


@pytest.mark.parametrize("what", [what for what, (*_, way) in WAYS.items() if way != ELEMENTWISE])
def test_weights_that_begin_inside_a_vector_are_copied_one_by_one(copied, what):
    """One packing serves all, wherever weights begin."""
    problem, precision, strides, _ = WAYS[what]
    tile = tile_of(problem, precision, "wgmma")
    chunks = tile.channel_chunks(problem)
    aligned, w = (weights(problem, tile.dtype, strides, offset) for offset in (0, 1))
    packing = tensor_pack.packing_of(problem, tile, "wgmma", chunks, Layout.of(w))
    assert packing is tensor_pack.packing_of(problem, tile, "wgmma", chunks, Layout.of(aligned))
    packed = torch.full((packing.size,), torch.nan, dtype=tile.dtype)
    packing.launch(w, packed)
    assert not copied
    assert np.array_equal(packed.float().numpy(), expected(w.float().numpy(), problem, tile, "wgmma", chunks))


@pytest.mark.parametrize("what", PROBLEMS)
def test_a_box_fits_into_its_shared_memory(what):
    for order, precision in itertools.product(("wgmma", "mma"), DTYPES):
        tile = tile_of(PROBLEMS[what], precision, order)
        box = tensor_pack.box_of(tile)
        taps = PROBLEMS[what].kernel_size if tile.whole and not tile.several_chunks else tile.tap_chunk * tile.phases
        assert box.shared_bytes >= tile.depth * tile.channels * taps * tile.itemsize
        assert tensor_pack.kernel_of(tile, order).shared_bytes == box.shared_bytes


def test_boxes_of_the_largest_tiles_fit_into_a_block_of_any_gpu():
    """Where the rungs run: 8.6, 8.9 and 12.0 have 99 KB."""
    for precision, (stride, taps) in itertools.product(DTYPES, itertools.product((1, 5, 96, 128, 256), (1, 2, 21, 40))):
        tile = make_tile(Problem(1, 64, 128, stride * taps, 64, stride=stride), precision)
        assert tensor_pack.box_of(tile).shared_bytes <= 99 * 1024
