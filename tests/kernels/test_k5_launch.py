"""Arguments of k5's launches by name, without a GPU; and the banks that windows fill."""

import inspect
from dataclasses import replace

import pytest

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core.store_any import alignment_of
from numba_tconv.kernels.k5_mma import choose as k5_choice
from numba_tconv.kernels.k5_mma import kernel as k5_mma
from numba_tconv.kernels.k5_mma.epilogue import gaps_between
from numba_tconv.kernels.k5_mma.tile import RUN, run_of
from numba_tconv.lab.measure import workloads
from numba_tconv.runtime.device import H200
from numba_tconv.runtime.layout import NO_GPU, Layout

FEW = replace(H200, multiprocessors=2)
LANES = range(32)


@pytest.fixture(autouse=True)
def nothing_remembered():
    k5_mma._plan.cache_clear()
    yield
    k5_mma._plan.cache_clear()


def launch_of(p, precision, here, strides=None, offset=0, y_offset=0, has_bias=True, config=None):
    """The packing, the launch and its arguments by name. ``strides``: of x, in elements."""
    dtype = DTYPES[precision]
    shape, y_strides = p.in_shape, (p.in_channels * p.length, p.length, 1)
    x = Layout(shape, strides or y_strides, dtype, NO_GPU, offset)
    w = Layout.contiguous(p.weight_shape, dtype, NO_GPU)
    packing, launch = k5_mma._plan(p, config, precision, x, w, has_bias, y_offset, here)
    names = inspect.signature(launch.kernel.function).parameters
    return packing, launch, dict(zip(names, launch.arguments, strict=True))


# Streamed weights: row tiles, groups, chunks of taps, a stride, many columns. Resident ones: row tiles, groups.
STREAMED = [
    (Problem(3, 24, 300, 5, 200, padding=2), "tf32"),
    (Problem(2, 48, 96, 4, 300, stride=2, padding=1, groups=3, bias=True), "bf16"),
    (Problem(1, 16, 40, 61, 330, padding=30), "tf32"),
    (Problem(5, 40, 24, 9, 700, stride=4, dilation=3, output_padding=2), "fp16"),
    (Problem(2, 32, 64, 3, 400), "tf32x3"),
]
RESIDENT = [
    (Problem(2, 48, 24, 3, 5756), "tf32"),
    (Problem(3, 32, 32, 3, 2052, groups=2, padding=1), "tf32"),
    (Problem(4, 24, 280, 3, 4096), "bf16"),
]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("p", "precision", "resident"), [*[(*case, False) for case in STREAMED], *[(*case, True) for case in RESIDENT]]
)
def test_arguments_are_the_problems(p, precision, resident, has_bias):
    here = FEW if resident else H200
    config = k5_choice.choose(p, precision, here)
    assert (config.resident_weights > 0) == resident
    strides = p.in_channels * p.length + 16, p.length + 8, 1  # every row begins at a multiple of 16 bytes
    if p.length * config.tile.itemsize % 16:
        strides, config = None, k5_choice.config_of(p, precision, here, *_contiguous(p), 0)
    packing, launch, given = launch_of(p, precision, here, strides, y_offset=8, has_bias=has_bias)
    assert launch.kernel is k5_mma.make_kernel(config)
    tile, dtype = config.tile, DTYPES[precision]
    x, weights, y, sizes, loop = (given.pop(name) for name in ("x", "weights", "y", "sizes", "loop"))
    strides = strides or _contiguous(p)[1]
    assert (x.data.stride(), x.data.shape, x.data.dtype) == (strides, p.in_shape, dtype)
    assert (x.stride_n, x.stride_c) == strides[:2]
    assert y.shape == p.out_shape
    assert (weights.has_bias, weights.packed.shape) == (has_bias, (packing.size,))
    assert weights.bias.shape == ((p.out_channels,) if has_bias else weights.packed.shape)
    assert (sizes.batch, sizes.length, sizes.out_length) == (p.batch, p.length, p.out_length)
    assert (sizes.in_per_group, sizes.out_per_group) == (p.in_channels // p.groups, p.out_channels // p.groups)
    assert (sizes.groups, sizes.padding) == (p.groups, p.padding)
    assert (sizes.first_column, sizes.columns) == tile.columns(p)
    assert given.pop("alignment") == alignment_of(8, p, tile, gaps_between(tile))
    # A block loops over the stages packed for its rows.
    assert loop.stages_a_chunk * config.depth >= sizes.in_per_group > (loop.stages_a_chunk - 1) * config.depth
    assert loop.tap_chunks * tile.tap_chunk >= p.taps.taps_per_row > (loop.tap_chunks - 1) * tile.tap_chunk
    stages = p.groups * loop.group_tiles * loop.tap_chunks * loop.stages_a_chunk
    packed = (packing.size - (4 if tile.operand_halves == 2 else 0)) * tile.itemsize
    assert packed == stages * config.w_stage
    assert launch.grid[0] == p.groups * loop.group_tiles
    all_tiles = tile.column_tiles(p)
    if resident:
        assert given == {"column_tiles": all_tiles}
        assert launch.grid[1:] == (max(1, here.multiprocessors // launch.grid[0]), 1)
    else:
        assert given == {"stride_l": 1}
        assert launch.grid[1:] == (-(-all_tiles // config.tiles), 1)


def _contiguous(p):
    return p.in_shape, (p.in_channels * p.length, p.length, 1)


def test_more_column_tiles_than_an_axis_of_the_grid_has(monkeypatch):
    monkeypatch.setattr("numba_tconv.kernels.common.arguments.GRID_AXIS", 4)
    p, precision = STREAMED[3]
    _, launch, _ = launch_of(p, precision, H200)
    config = k5_choice.config_of(p, precision, H200, *_contiguous(p), 0)
    blocks = -(-config.tile.column_tiles(p) // config.tiles)
    _, along, planes = launch.grid
    assert along <= 4 < blocks <= along * planes < blocks + planes


def test_elements_that_lie_apart_are_copied_one_by_one():
    p, precision = STREAMED[0]
    strides = 2 * p.in_channels * p.length, 2 * p.length, 2
    _, launch, given = launch_of(p, precision, H200, strides)
    assert (given["stride_l"], given["x"].stride_n, given["x"].stride_c) == (2, *strides[:2])
    assert launch.kernel is k5_mma.make_kernel(k5_choice.choose(p, precision, H200, aligned=False, contiguous=False))


@pytest.mark.parametrize(("strides", "offset"), [((24 * 200, 200, 1), 4), ((24 * 202, 202, 1), 0), ((4801, 200, 1), 0)])
def test_a_given_configuration_copies_rows_that_begin_anywhere_in_words(strides, offset):
    """One condition of by_vectors fails at a time: where x, its channels and its samples begin."""
    p, precision = STREAMED[0]
    config = k5_choice.choose(p, precision, H200)
    assert config.x_vector == 4
    _, launch, _ = launch_of(p, precision, H200, strides, offset, config=config)
    assert launch.kernel is k5_mma.make_kernel(replace(config, x_vector=1))
    _, launch, _ = launch_of(p, precision, H200, (4800, 200, 1), 0, config=config)
    assert launch.kernel is k5_mma.make_kernel(config)


@pytest.mark.parametrize("precision", DTYPES)
def test_a_quarter_warp_reads_its_windows_from_different_banks(precision):
    """Eight lanes read 16 bytes each, of two columns and four channels or pairs of channels."""
    pitches = set()
    for workload in workloads.WORKLOADS.values():
        config = k5_choice.choose(workload.problem, precision)
        if config is None:
            continue
        itemsize, pitch = config.tile.itemsize, config.pitch
        pitches.add(pitch)
        at = [(lane % 4 * (4 // itemsize) * pitch + run_of(lane // 4, itemsize) * RUN) * itemsize for lane in LANES]
        for first in range(0, 32, 8):
            assert len({at[lane] // 16 % 8 for lane in range(first, first + 8)}) == 8, (workload, first)
    assert len(pitches) >= 3
