"""Which kernel computes a step, by layer, sizes, precision and layout; tiles of steps on tensor cores."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.precision import TF32_ALLOWED
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.streaming import depthwise, mma_tile, plan, tile
from numba_tconv.lab.studies.streaming import LAYERS
from numba_tconv.runtime.device import A100, H200, LIMITS, RESERVED_SHARED
from numba_tconv.runtime.kernel import Kernel
from numba_tconv.runtime.layout import Layout

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
LAYER = Problem(16, 128, 64, 8, 2, 4)  # 16 slots, two new frames
DEPTHWISE = Problem(16, 64, 64, 4, 2, 2, groups=64)
COLUMNS, PRODUCTS, CHANNELS = tile.Config, mma_tile.Config, depthwise.Config


def laid_out(p, dtype):
    """x, state and weight."""
    shapes = p.in_shape, (p.batch, p.in_channels, p.taps.shift(p.kernel_size - 1)), p.weight_shape
    return [Layout.contiguous(shape, dtype, -1) for shape in shapes]


def chosen(layer=LAYER, dtype=F32, precision="tf32", x=None, state=None, weight=None):
    """The configuration's type; ``x``, ``state`` and ``weight`` change contiguous layouts."""
    changed = zip(laid_out(layer, dtype), (x, state, weight), strict=True)
    return type(plan.choose(*(one._replace(**(change or {})) for one, change in changed), layer, precision))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(), PRODUCTS),
        (dict(precision=TF32_ALLOWED), PRODUCTS),
        (dict(dtype=BF16, precision="bf16"), PRODUCTS),
        (dict(dtype=F16, precision="fp16"), PRODUCTS),
        (dict(precision="ieee"), COLUMNS),
        (dict(precision="tf32x3"), COLUMNS),
        (dict(dtype=F64, precision="fp64"), COLUMNS),
        (dict(layer=replace(LAYER, dilation=2)), COLUMNS),
        (dict(layer=replace(LAYER, kernel_size=7)), COLUMNS),
        (dict(layer=replace(LAYER, kernel_size=3)), COLUMNS),
        (dict(layer=replace(LAYER, in_channels=126)), COLUMNS),
        (dict(layer=replace(LAYER, in_channels=132)), PRODUCTS),
        (dict(layer=replace(LAYER, in_channels=132), dtype=BF16, precision="bf16"), COLUMNS),
        (dict(layer=replace(LAYER, kernel_size=256, stride=128)), PRODUCTS),
        (dict(layer=replace(LAYER, batch=1, length=1)), PRODUCTS),
        (dict(layer=replace(LAYER, batch=1, length=4)), PRODUCTS),
        (dict(layer=replace(LAYER, batch=1, length=1), dtype=BF16, precision="bf16"), PRODUCTS),
        (dict(layer=replace(LAYER, batch=1, length=32)), PRODUCTS),
        (dict(layer=replace(LAYER, batch=1, length=65)), COLUMNS),  # frames that no block holds
        (dict(layer=replace(LAYER, kernel_size=1, stride=tile.MOST_STRIDE)), COLUMNS),
        (dict(layer=replace(LAYER, kernel_size=1, stride=tile.MOST_STRIDE + 1)), type(None)),
        (dict(x=dict(offset=4)), COLUMNS),
        (dict(state=dict(offset=8)), COLUMNS),
        (dict(weight=dict(offset=4)), COLUMNS),
        (dict(x=dict(strides=(256, 1, 128))), COLUMNS),
        (dict(x=dict(strides=(514, 2, 1))), COLUMNS),
        (dict(x=dict(strides=(516, 2, 1))), PRODUCTS),
        (dict(x=dict(strides=(0, 2, 1))), PRODUCTS),
        (dict(x=dict(strides=(1024, 4, 1))), COLUMNS),
        (dict(weight=dict(strides=(512, 1, 64))), COLUMNS),
        (dict(weight=dict(strides=(514, 8, 1))), COLUMNS),
        (dict(weight=dict(strides=(516, 8, 1))), PRODUCTS),
        (dict(layer=replace(LAYER, length=1), x=dict(strides=(128, 1, 7))), PRODUCTS),
        (dict(layer=replace(LAYER, length=1), x=dict(strides=(256, 2, 1))), COLUMNS),
        (dict(layer=DEPTHWISE), CHANNELS),
        (dict(layer=DEPTHWISE, precision="ieee", x=dict(offset=4)), CHANNELS),
        (dict(layer=DEPTHWISE, dtype=F64, precision="fp64"), CHANNELS),
        (dict(layer=replace(DEPTHWISE, length=5)), COLUMNS),
        (dict(layer=replace(DEPTHWISE, kernel_size=40)), COLUMNS),
        (dict(layer=replace(DEPTHWISE, kernel_size=8, dilation=2)), COLUMNS),  # too many frames kept
        (dict(layer=replace(DEPTHWISE, batch=65_536)), COLUMNS),
        (dict(layer=replace(DEPTHWISE, out_channels=128)), COLUMNS),
    ],
    ids=str,
)
def test_who_computes(changes, expected):
    assert chosen(**changes) is expected


def test_nobody_computes_what_no_block_holds():
    assert chosen(Problem(1, 16, 16, 9, 1, 1, dilation=700), precision="ieee") is type(None)
    just_fits = Problem(1, 20_164, 1, 1, 1)  # 80 KiB
    assert chosen(just_fits, precision="ieee") is COLUMNS
    assert chosen(replace(just_fits, in_channels=20_165), precision="ieee") is type(None)


@pytest.mark.parametrize("dilation", [1, 160, 330, 1300])
def test_a_block_has_as_many_groups_as_fit(dilation):
    p = Problem(1, 128, 64, 2, 1, 1, groups=64, dilation=dilation)
    config = tile.choose(p, F32)
    fitting = [n for n in (64, 32, 16, 8, 4) if replace(config, group_count=n).shared_bytes <= tile.MOST_SHARED]
    assert config.group_count == fitting[0]
    assert (dilation == 1) == (fitting[0] == 64)


@pytest.mark.parametrize("shared", sorted({limit - RESERVED_SHARED for _, _, limit in LIMITS.values()}))
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_tiles_fit_and_cover_the_layer(shared, dtype):
    for name, layer in LAYERS.items():
        for slots, frames in ((8, 1), (64, 1), (3, 5), (256, 1), (64, 4), (1, 32)):
            p = replace(layer, batch=slots, length=frames)
            if mma_tile.refusal(p, dtype, mma_tile.PRECISIONS[dtype], shared):
                assert name in ("mimi_upsample",)
                continue
            c = mma_tile.choose(p, dtype, shared)
            groups, row_tiles, slot_tiles = mma_tile.blocks_of(p, c)
            assert c.shared_bytes + mma_tile.STATIC_SHARED <= shared
            assert c.sums_at + c.sums_bytes <= c.shared_bytes
            assert groups * row_tiles * c.channels >= p.out_channels
            assert slot_tiles * mma_tile.slots_of(c, frames) >= slots
            assert c.columns // c.column_warps in (8, 16, 32, 64)
            assert c.channel_warps * c.column_warps == c.warps
            assert c.frames <= frames < 2 * c.frames
            assert c.ahead >= 1
            assert c.threads <= 512
            assert c.ahead + 1 + c.delay == c.stages
            assert c.weight_row % 16 == c.weight_pitch % 16 == c.frame_pitch % 16 == 0
            assert c.weight_pitch >= c.weight_row
            assert c.threads * c.row_blocks * c.column_blocks * 4 <= 65_536 // 2


# Channels, columns, warps, those that share columns, stages, slices, and whether sums lie apart: as they were timed.
TIMED = {
    ("mimi_1", 64, 4): (8, 128, 16, 4, 5, 1, False),
    ("mimi_1", 64, 1): (4, 64, 16, 2, 4, 1, False),
    ("qwen3_omni_1", 64, 4): (12, 128, 8, 4, 6, 1, False),
    ("qwen3_omni_2", 64, 4): (12, 64, 8, 1, 4, 1, False),
    ("mimi_4", 64, 4): (4, 32, 8, 1, 4, 2, True),
}


@pytest.mark.parametrize("step", TIMED, ids=str)
def test_the_tiles_that_were_timed_are_taken(step):
    name, slots, frames = step
    c = mma_tile.choose(replace(LAYERS[name], batch=slots, length=frames), F32)
    assert (c.channels, c.columns, c.warps, c.column_warps, c.stages, c.slices, c.apart) == TIMED[step]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_fragments_are_read_without_bank_conflicts(dtype):
    """Where a row block is one output channel's phases: stride 8."""
    c = mma_tile.choose(replace(LAYERS["mimi_1"], batch=64, length=1), dtype)
    halves = 4 // c.itemsize
    weights = {(t * halves * c.weight_pitch + g * c.itemsize) // 4 % 32 for t in range(4) for g in range(8)}
    frames = {(g * c.frame_pitch + t * halves * c.itemsize) // 4 % 32 for t in range(4) for g in range(8)}
    sums = {(2 * t * c.sum_pitch + g) % 32 for t in range(4) for g in range(8)}
    assert len(weights) == 32 // halves  # a word has two 16-bit rows
    assert len(frames) == len(sums) == 32


@pytest.mark.parametrize("layer", [LAYER, DEPTHWISE], ids=["tensor cores", "depthwise"])
@pytest.mark.parametrize(("gpu", "expected"), [(A100, False), (H200, True)], ids=["A100", "H200"])
def test_early_only_where_the_gpu_can(layer, gpu, expected, monkeypatch):
    seen = []
    monkeypatch.setattr(Kernel, "prepare", lambda *_, early=False: seen.append(early))
    monkeypatch.setattr(plan.device, "of", lambda _: gpu)
    x, state, weight = laid_out(layer, F32)
    plan.prepare(x, weight, None, False, layer, plan.choose(x, state, weight, layer, "tf32"))
    assert seen == [expected]


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64])
@pytest.mark.parametrize("channels", [(1, 1), (1, 512), (512, 512), (65, 7)], ids=str)
def test_a_block_by_columns_counts_its_outputs_in_32_bits(channels, dtype):
    for groups, taps, new in ((1, 1, 1), (64, 1, 32), (2, 5, 16)):
        in_channels, out_channels = (groups * count for count in channels)
        problem = Problem(64, in_channels, out_channels, taps, new, tile.MOST_STRIDE, groups=groups)
        config = tile.choose(problem, dtype)
        outputs = config.sums * config.group_count * config.channels * problem.stride
        assert outputs + config.threads < 2**31
