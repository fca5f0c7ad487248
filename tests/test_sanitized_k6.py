"""The problems of the memory checks reach every path of k6 that sizes decide (see test_sanitized.py)."""

import itertools
import math

import pytest

from numba_tconv.formula.precision import DTYPES
from numba_tconv.kernels.common.split_sums import split
from numba_tconv.kernels.common.tensor_core.rung import by_vectors
from numba_tconv.kernels.common.tensor_core.store_any import alignment_of
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.kernels.k6_wgmma.boxes import row_alignment
from numba_tconv.kernels.k6_wgmma.schedule import make_schedule
from numba_tconv.kernels.k6_wgmma.windows import make_window_start
from numba_tconv.runtime import device

from .gpu.common import TENSOR_CORES
from .gpu.sanitized import as_if_large
from .parity import LAYOUTS
from .test_sanitized import BOTH, SHAPES, input_of, of_rung, shape_of, values

pytestmark = pytest.mark.skipif(not TENSOR_CORES, reason="the simulator has no tensor cores")

CONSUMERS = 2  # warpgroups


@pytest.fixture(scope="module", autouse=True)
def small_gpu():
    with as_if_large():
        yield


def k6(case):
    return case.config


def rows(case):
    x, offset = input_of(case)
    return row_alignment(x.shape, x.stride(), offset, k6(case), case.problem.groups)


def windows(case):
    """How a problem's windows arrive: in boxes of rows, with the number of rows that begin differently; or filled "in
    vectors" or "by elements", with their place in such a box or in one of aligned rows."""
    config, p, described = k6(case), case.problem, rows(case)
    x, offset = input_of(case)
    if not described:
        x = x.contiguous()
    aligned = by_vectors(x.shape, x.stride(), offset, config.tile) and p.length * x.itemsize % 16 == 0
    sample_of, window_start = make_schedule(config).sample_of.py_func, make_window_start(config).py_func
    first, columns = k6_config.sample_columns(p, config)
    for tile, chunk in itertools.product(range(k6_config.column_tiles(p, config)), range(config.tile.tap_chunks(p))):
        n, j = sample_of(tile, columns)
        apart = columns % config.tile.advance == 0
        boxed = window_start(n, j, chunk, described is not None, apart, p.length, columns, first)[2]
        sheared = described is not None and not described.aligned
        yield described.alike if boxed else ("in vectors" if aligned else "by elements", sheared)


def k6_properties(case):
    config = k6(case)
    tile, p = config.tile, case.problem
    tiles = k6_config.column_tiles(p, config) * tile.row_tiles(p) * p.groups
    part = split(p, config.splits)
    missing = k6_config.channel_chunks(part, config) > tile.channel_chunks(part)
    return {
        "weights, parts": (config.resident, tile.operand_halves),
        "weights, split ahead": tile.operand_halves == 2 and (config.resident, config.split_ahead),
        "weights, size of an element": (config.resident, tile.itemsize),
        "weights, unrolled, of a stage": (config.resident, config.unroll, config.depths),
        "weights, chunks of taps": (config.resident, tile.several_chunks),
        "windows in a stage": config.regions,
        "staging buffers": config.buffers,
        "rows in rounds: staging buffers, parts": config.by_rows
        and (config.buffers, config.round_buffers, tile.operand_halves),
        "rows in rounds: outputs at a time, bias": config.by_rows
        and (alignment_of(case.offset * tile.out_dtype.itemsize, p, tile)[1], p.bias),
        "joined": config.joined,
        "runs on sectors, last columns apart, size of an element": tile.whole
        and (tile.aligned, config.tail, tile.itemsize),
        "last columns apart, parts": (config.tail, tile.operand_halves),
        "runs that begin anywhere, by warps: rows in rounds, outputs at a time": tile.whole
        and not (tile.aligned or config.bulk_channels)
        and (config.by_rows, alignment_of(case.offset * 4, p, tile)[1]),
        "split, part, size of an element": config.splits > 1 and (tile.by_phases, tile.itemsize),
        "stores, paired": (config.bulk_channels and tile.channels // config.bulk_channels, config.paired),
        "stores, shape": (config.bulk_channels > 0, shape_of(tile)),
        "stores, empty slots, size": tile.whole and (config.bulk_channels > 0, tile.has_gaps, tile.itemsize),
        "halves side by side: outputs staged together": bool(config.bulk_channels)
        and tile.span == 1
        and tile.out_dtype.itemsize == 2
        and (1 if p.out_length % 2 or (p.padding + case.offset) % 2 else 2),
        "rounds": tile.rounds > 1,
        "row tiles": tile.row_tiles(p) > 1,
        "shape": shape_of(tile),
        "whole, empty slots": tile.whole and tile.has_gaps,
        "single, empty slots": not tile.whole and tile.dilation > 1 and tile.has_gaps,
        "precision": case.precision,
        "channels that do not exist": p.in_channels_per_group % tile.depth > 0,
        "without channels: of a stage": missing and config.depths,
        "whole: empty slots, outputs at a time, size": tile.whole
        and (tile.has_gaps, math.gcd(4, p.out_length), tile.itemsize),
        "whole: empty slots, y within a sector": tile.whole and (tile.has_gaps, case.offset > 0),
        "whole: empty slots, turns": tile.whole
        and (tile.has_gaps, tiles > 2 * CONSUMERS * device.current_device().multiprocessors),
        "turns": (config.resident, config.paired, tiles > 2 * CONSUMERS * device.current_device().multiprocessors),
        "shape, sheared": (shape_of(tile), bool(rows(case)) and rows(case).alike > 1),
        "groups, a tensor map": (p.groups > 1, rows(case) is not None),
        "layout": case.layout,
    }


def test_k6():
    found = values(map(k6_properties, of_rung("k6_wgmma")))
    expected = {
        "weights, parts": {(r, parts) for r in BOTH for parts in (1, 2)},
        "weights, split ahead": {False} | {(r, ahead) for r in BOTH for ahead in BOTH},
        "weights, size of an element": {(r, size) for r in BOTH for size in (2, 4)},
        "weights, unrolled, of a stage": {(r, *depths) for r in BOTH for depths in ((1, 1), (2, 1), (2, 2))},
        "weights, chunks of taps": {(r, several) for r in BOTH for several in BOTH},
        "windows in a stage": {1, 2},
        "staging buffers": {0, 1, 2},
        "rows in rounds: staging buffers, parts": {False, (1, 1, 1)}
        | {(2, of_round, parts) for of_round in (1, 2) for parts in (1, 2)},
        "rows in rounds: outputs at a time, bias": {False}
        | {(outputs, bias) for outputs in (1, 2, 4) for bias in BOTH},
        "joined": BOTH,
        "runs on sectors, last columns apart, size of an element": {False}
        | {(*way, size) for way in ((True, False), (False, False), (False, True)) for size in (2, 4)},
        "last columns apart, parts": {(apart, parts) for apart in BOTH for parts in (1, 2)},
        "runs that begin anywhere, by warps: rows in rounds, outputs at a time": {False}
        | {(rounds, outputs) for rounds in BOTH for outputs in (1, 2, 4)},
        "split, part, size of an element": {False} | {(part, size) for part in BOTH for size in (2, 4)},
        # By kernels/common/tensor_core/store_runs.py, or in bulk, in one round or two.
        "stores, paired": {(rounds, paired) for rounds in (0, 1, 2) for paired in BOTH},
        "stores, shape": {(False, shape) for shape in SHAPES} | {(True, "whole")},
        "stores, empty slots, size": {False} | {(b, empty, size) for b in BOTH for empty in BOTH for size in (2, 4)},
        "halves side by side: outputs staged together": {False, 1, 2},
        "rounds": BOTH,
        "row tiles": BOTH,
        "shape": SHAPES,
        "whole, empty slots": BOTH,
        "single, empty slots": BOTH,
        "precision": set(DTYPES),
        "channels that do not exist": BOTH,
        "without channels: of a stage": {False, 1, 2},
        "whole: empty slots, outputs at a time, size": {False}
        | {(empty, outputs, size) for empty in BOTH for outputs in (1, 2, 4) for size in (2, 4)},
        "whole: empty slots, y within a sector": {False} | {(empty, within) for empty in BOTH for within in BOTH},
        "whole: empty slots, turns": {False} | {(empty, many) for empty in BOTH for many in BOTH},
        "shape, sheared": {(shape, several) for shape in SHAPES for several in BOTH},
        "groups, a tensor map": {(several, described) for several in BOTH for described in BOTH},
        "layout": set(LAYOUTS),
        # Both warpgroups share streamed weights.
        "turns": {(r, paired, m) for r, paired in ((True, False), (True, True), (False, True)) for m in BOTH},
    }
    assert found == expected


# Resident or streamed, in every precision, windows arrive in every way.
@pytest.mark.parametrize(
    ("precision", "resident", "empty_slots"),
    [
        ("tf32", True, False),
        ("tf32", False, False),
        ("tf32", True, True),
        ("tf32x3", True, False),
        ("tf32x3", False, False),
        ("fp16", True, True),
        ("bf16", False, False),
    ],
)
def test_k6_windows(precision, resident, empty_slots):
    configs = [(case, k6(case)) for case in of_rung("k6_wgmma") if case.precision == precision]
    found = {
        window
        for case, config in configs
        if config.tile.whole and (config.resident, config.tile.has_gaps) == (resident, empty_slots)
        for window in windows(case)
    }
    # Vectors fill rows at 16 bytes, which take one box.
    filled = {("in vectors", False), ("by elements", True)}
    assert found >= filled | {1, 16 // DTYPES[precision].itemsize}, found


def test_k6_without_a_tensor_map():
    assert {("in vectors", False), ("by elements", False)} <= {
        window for case in of_rung("k6_wgmma") if rows(case) is None for window in windows(case)
    }
