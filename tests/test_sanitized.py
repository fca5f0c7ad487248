"""The problems for compute-sanitizer (gpu/sanitized.py), on the CPU: they reach every code path that sizes decide."""

import itertools
import math

import pytest
import torch

from numba_tconv.kernels import RUNGS, depthwise_config, depthwise_direct, device, k4_cost, k5_config, k6_config
from numba_tconv.kernels.gradients import GRADIENTS
from numba_tconv.kernels.k4_plan import vectors_align
from numba_tconv.kernels.k6_box import rows_of
from numba_tconv.kernels.k6_load import make_walk, make_window_start
from numba_tconv.kernels.tensor_rung import by_vectors
from numba_tconv.kernels.tensor_store import alignment_of
from numba_tconv.kernels.tensor_tile import DTYPES
from numba_tconv.layout import Layout
from tests.gpu.common import TENSOR_CORES
from tests.gpu.sanitized import Forward, as_if_large, cases, moved
from tests.parity import LAYOUTS, operands, parameters

pytestmark = pytest.mark.skipif(not TENSOR_CORES, reason="the simulator has no tensor cores")

BOTH = {False, True}
SHAPES = {"whole", "part", "single"}
CONSUMERS = 2  # warpgroups of k6 that multiply


@pytest.fixture(scope="module", autouse=True)
def small_gpu():
    with as_if_large():
        yield


def of_rung(name):
    found = [case for case in cases() if case.rung == name]
    assert found
    return found


def shape_of(tile):
    """One of SHAPES (tensor_tile.py)."""
    return "whole" if tile.whole else "part" if tile.dilation == 1 else "single"


def input_of(case):
    """x, as it lies in memory, and the bytes from a multiple of 16 to its first element."""
    x = operands(case.problem, case.dtype, layout=case.layout)[0]
    return x, x.storage_offset() * x.itemsize % 16


def values(properties):
    """Of each property, the values that occur."""
    properties = list(properties)
    return {name: {p[name] for p in properties} for name in properties[0]}


def test_every_rung_takes_its_problems():
    for case in cases():
        rung, precision = (RUNGS | GRADIENTS)[case.rung], getattr(case, "precision", "") or ""
        assert rung.supports(case.problem, case.dtype, precision) is None, case
        assert case.problem.batch * case.problem.out_channels * case.problem.out_length < 200_000, "too slow"
    assert {case.rung for case in cases()} == {*RUNGS, *GRADIENTS}


@pytest.mark.parametrize("rung", RUNGS)
def test_every_dtype_precision_and_bias(rung):
    took = of_rung(rung)
    known = {(case.dtype, case.precision) for case in cases() if isinstance(case, Forward)}
    problem = took[0].problem
    able = {pair for pair in known if RUNGS[rung].supports(problem, *pair) is None}
    assert {(case.dtype, case.precision) for case in took} == able
    assert {case.problem.bias for case in took} == BOTH
    assert {case.problem.groups > 1 for case in took} == BOTH
    assert {case.problem.stride == 1 for case in took} == BOTH
    assert {case.layout == "contiguous" for case in took} == BOTH


# k6


def k6(case):
    return case.config


def rows(case):
    x, offset = input_of(case)
    return rows_of(x.shape, x.stride(), offset, k6(case), case.problem.groups)


def windows(case):
    """How the windows of a problem come: in boxes of rows as many of which begin unlike, or filled "in vectors" or "by
    elements", which where it would stand in such a box or in one of aligned rows."""
    config, p, described = k6(case), case.problem, rows(case)
    x, offset = input_of(case)
    if not described:
        x = x.contiguous()
    aligned = by_vectors(x.shape, x.stride(), offset, config.tile) and p.length * x.itemsize % 16 == 0
    sample_of, window_start = make_walk(config)[0].py_func, make_window_start(config).py_func
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
    stages = k6_config.channel_chunks(p, config)
    return {
        "weights, parts": (config.resident, tile.parts),
        "weights, size of an element": (config.resident, tile.itemsize),
        "weights, unrolled": (config.resident, config.unroll),
        "weights, chunks of taps": (config.resident, tile.several_chunks),
        "windows in a stage": config.regions,
        "staging buffers": config.buffers,
        "rows in rounds: staging buffers, parts": config.by_rows and (config.buffers, config.round_buffers, tile.parts),
        "rows in rounds: outputs at a time, bias": config.by_rows
        and (alignment_of(case.offset * tile.out_dtype.itemsize, p, tile)[1], p.bias),
        "joined": config.joined,
        "runs on sectors, last columns apart, size of an element": tile.whole
        and (tile.aligned, config.tail, tile.itemsize),
        "split, part, size of an element": config.splits > 1 and (tile.part, tile.itemsize),
        "stores, paired": (config.bulk_channels and tile.channels // config.bulk_channels, config.paired),
        "stores, shape": (config.bulk_channels > 0, shape_of(tile)),
        "stores, empty slots, size": tile.whole and (config.bulk_channels > 0, tile.empty_slots, tile.itemsize),
        "rounds": tile.rounds > 1,
        "row tiles": tile.row_tiles(p) > 1,
        "shape": shape_of(tile),
        "whole, empty slots": tile.whole and tile.empty_slots,
        "single, empty slots": not tile.whole and tile.dilation > 1 and tile.empty_slots,
        "precision": case.precision,
        "channels that do not exist": p.in_channels_per_group % tile.depth > 0,
        "stages without channels": stages > tile.channel_chunks(p),
        "whole: empty slots, outputs at a time, size": tile.whole
        and (tile.empty_slots, math.gcd(4, p.out_length), tile.itemsize),
        "whole: empty slots, y within a sector": tile.whole and (tile.empty_slots, case.offset > 0),
        "whole: empty slots, turns": tile.whole
        and (tile.empty_slots, tiles > 2 * CONSUMERS * device.current_device().multiprocessors),
        "turns": (config.resident, config.paired, tiles > 2 * CONSUMERS * device.current_device().multiprocessors),
        "shape, sheared": (shape_of(tile), bool(rows(case)) and rows(case).alike > 1),
        "groups, a tensor map": (p.groups > 1, rows(case) is not None),
        "layout": case.layout,
    }


def test_k6():
    found = values(map(k6_properties, of_rung("k6_wgmma")))
    expected = {
        "weights, parts": {(r, parts) for r in BOTH for parts in (1, 2)},
        "weights, size of an element": {(r, size) for r in BOTH for size in (2, 4)},
        "weights, unrolled": {(r, unroll) for r in BOTH for unroll in (1, 2)},
        "weights, chunks of taps": {(r, several) for r in BOTH for several in BOTH},
        "windows in a stage": {1, 2},
        "staging buffers": {0, 1, 2},
        "rows in rounds: staging buffers, parts": {False, (2, 2, 1), (2, 1, 1), (1, 1, 1), (2, 2, 2)},
        "rows in rounds: outputs at a time, bias": {False}
        | {(outputs, bias) for outputs in (1, 2, 4) for bias in BOTH},
        "joined": BOTH,
        "runs on sectors, last columns apart, size of an element": {False}
        | {(*way, size) for way in ((True, False), (False, False), (False, True)) for size in (2, 4)},
        "split, part, size of an element": {False} | {(part, size) for part in BOTH for size in (2, 4)},
        # By tensor_runs.py, or in bulk, in one round or in two.
        "stores, paired": {(rounds, paired) for rounds in (0, 1, 2) for paired in BOTH},
        "stores, shape": {(False, shape) for shape in SHAPES} | {(True, "whole")},
        "stores, empty slots, size": {False} | {(b, empty, size) for b in BOTH for empty in BOTH for size in (2, 4)},
        "rounds": BOTH,
        "row tiles": BOTH,
        "shape": SHAPES,
        "whole, empty slots": BOTH,
        "single, empty slots": BOTH,
        "precision": set(DTYPES),
        "channels that do not exist": BOTH,
        "stages without channels": BOTH,
        "whole: empty slots, outputs at a time, size": {False}
        | {(empty, outputs, size) for empty in BOTH for outputs in (1, 2, 4) for size in (2, 4)},
        "whole: empty slots, y within a sector": {False} | {(empty, within) for empty in BOTH for within in BOTH},
        "whole: empty slots, turns": {False} | {(empty, many) for empty in BOTH for many in BOTH},
        "shape, sheared": {(shape, several) for shape in SHAPES for several in BOTH},
        "groups, a tensor map": {(several, described) for several in BOTH for described in BOTH},
        "layout": set(LAYOUTS),
        # Streamed weights are for both warpgroups at once.
        "turns": {(r, paired, m) for r, paired in ((True, False), (True, True), (False, True)) for m in BOTH},
    }
    assert found == expected


# Resident or streamed, in every precision: the windows come in every way.
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
        if config.tile.whole and (config.resident, config.tile.empty_slots) == (resident, empty_slots)
        for window in windows(case)
    }
    # Filled in vectors are rows at 16 bytes, which take one box.
    filled = {("in vectors", False), ("by elements", True)}
    assert found >= filled | {1, 16 // DTYPES[precision].itemsize}, found


def test_k6_without_a_tensor_map():
    assert {("in vectors", False), ("by elements", False)} <= {
        window for case in of_rung("k6_wgmma") if rows(case) is None for window in windows(case)
    }


# k5


def k5(case):
    x, offset = input_of(case)
    config = k5_config.choose(case.problem, case.precision)
    aligned = by_vectors(x.shape, x.stride(), offset, config.tile)
    return config if aligned else k5_config.choose(case.problem, case.precision, aligned=False)


def k5_properties(case):
    config, p = k5(case), case.problem
    tile = config.tile
    return {
        "shape": shape_of(tile),
        "whole, empty slots": tile.whole and tile.empty_slots,
        "single, empty slots": not tile.whole and tile.dilation > 1 and tile.empty_slots,
        "parts, copies": (tile.parts, config.x_vector > 1),
        "size of an element, copies": (tile.itemsize, config.x_vector > 1),
        "chunks of taps": tile.several_chunks,
        "precision": case.precision,
        "tiles of a block": config.tiles > 1,
        "chunks of a stage": config.chunks > 1,
        "rounds": tile.rounds > 1,
        "row tiles": tile.row_tiles(p) > 1,
        "channels that do not exist": p.in_channels_per_group % config.depth > 0,
        "outputs at a time, size": tile.whole and (math.gcd(4, p.out_length), tile.itemsize),
        "y within a sector": case.offset > 0,
        "layout": case.layout,
    }


def test_k5():
    assert values(map(k5_properties, of_rung("k5_mma"))) == {
        "shape": SHAPES,
        "whole, empty slots": BOTH,
        "single, empty slots": BOTH,
        "parts, copies": {(parts, vectors) for parts in (1, 2) for vectors in BOTH},
        "size of an element, copies": {(size, vectors) for size in (2, 4) for vectors in BOTH},
        "chunks of taps": BOTH,
        "precision": set(DTYPES),
        "tiles of a block": BOTH,
        "chunks of a stage": BOTH,
        "rounds": BOTH,
        "row tiles": BOTH,
        "channels that do not exist": BOTH,
        "outputs at a time, size": {False} | {(outputs, size) for outputs in (1, 2, 4) for size in (2, 4)},
        "y within a sector": BOTH,
        "layout": set(LAYOUTS),
    }


# CUDA cores


def k4_properties(case):
    x, offset = input_of(case)
    x_vector = 16 // x.itemsize if vectors_align(Layout.of(x)._replace(offset=offset)) else 1
    config = case.config or k4_cost.choose(case.problem, case.dtype, x_vector, device.current_device())
    return {
        "copies": config.x_vector > 1,
        "vectors of outputs": config.y_vector > 1 and not case.offset,
        "chunks of taps": config.several_chunks,
        "ragged": config.ragged,
        "whole stages": config.whole_chunks,
        "partial sums, once": (config.partial > 0, config.once),
        "stages": config.stages,
        "gaps": config.taps.gap > 1,
        "dtype": case.dtype,
    }


def test_k4():
    assert values(map(k4_properties, of_rung("k4_register_tile"))) == {
        "copies": BOTH,
        "vectors of outputs": BOTH,
        "chunks of taps": BOTH,
        "ragged": BOTH,
        "whole stages": BOTH,
        "partial sums, once": {(False, False), (True, False), (True, True)},
        "stages": {2, 3},
        "gaps": BOTH,
        "dtype": {torch.float32, torch.float64},
    }


def depthwise_properties(case):
    """Where inputs lie in shared memory."""
    config = case.config or RUNGS["depthwise"].config(case.problem, case.dtype)
    passes, stretches = depthwise_config.plan(case.problem, config)
    return {
        "keeps weights": config.keeps_weights,
        "a warp for each row, passes": (config.lanes < config.threads, passes > 1),
        "stretches": stretches > 1,
        "gaps": config.taps.gap > 1,
        "ragged": config.taps.kernel_size % config.taps.rows > 0,
        "outputs of a group": config.out_per_group > 1,
        "inputs of a group": config.in_per_group > 1,
        "rows at 16 bytes": case.problem.length * case.dtype.itemsize % 16 == 0,
    }


def direct_properties(case):
    """Where they lie in registers."""
    p = case.problem
    config = case.config or RUNGS["depthwise"].config(p, case.dtype)
    passes, stretches = depthwise_direct.plan(p, config)
    return {
        "granule": config.granule,
        "several rows a block": config.lanes < config.threads,
        "passes": passes > 1,
        "passes at once": config.runs > 1,
        "stretches": stretches > 1,
        "outputs of a group": config.out_per_group > 1,
        "rows at 16 bytes": p.length * case.dtype.itemsize % 16 == 0,
        "positions apart": case.layout == "transposed",
        "y past 16 bytes": case.offset > 0,
    }


def depthwise_cases(form):
    return [
        case
        for case in of_rung("depthwise")
        if isinstance(case.config or RUNGS["depthwise"].config(case.problem, case.dtype), form)
    ]


def test_depthwise():
    found = values(map(depthwise_properties, depthwise_cases(depthwise_config.Config)))
    assert found.pop("a warp for each row, passes") == {(warps, several) for warps in BOTH for several in BOTH}
    assert all(occurring == BOTH for occurring in found.values()), found


def test_depthwise_in_registers():
    found = values(map(direct_properties, depthwise_cases(depthwise_direct.DirectConfig)))
    assert found.pop("granule") == {1, 4, 8}
    assert all(occurring == BOTH for occurring in found.values()), found


# What the script makes of a result


def torchs(self, x, w, bias, y, problem, config=None, precision=None):
    """In place of a rung's ``run``."""
    y.copy_(torch.conv_transpose1d(x, w, bias, **parameters(problem)))


def one_off(self, x, w, bias, y, *_):
    torchs(self, x, w, bias, y, *_)
    y[-1, -1, -1] += 0.1


def one_unwritten(self, x, w, bias, y, *_):
    torchs(self, x, w, bias, y, *_)
    y[0, 0, 0] = math.nan


def one_before(self, x, w, bias, y, *_):
    torchs(self, x, w, bias, y, *_)
    y.as_strided((1,), (1,), y.storage_offset() - 1).zero_()


@pytest.mark.parametrize("run", [one_off, one_unwritten, one_before, torchs], ids=lambda run: run.__name__)
def test_a_wrong_result_is_found(monkeypatch, run):
    case = next(case for case in of_rung("k5_mma") if case.offset)
    monkeypatch.setattr(type(RUNGS["k5_mma"]), "run", run)
    assert (case.wrong("cpu") is None) == (run is torchs)


def test_a_gradient_that_is_not_computed_is_found(monkeypatch):
    monkeypatch.setattr(type(GRADIENTS["grad_bias"]), "run", lambda *_, **__: None)
    assert of_rung("grad_bias")[0].wrong("cpu")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_move_with_their_storage(layout):
    tensor = LAYOUTS[layout](torch.randn(2, 3, 4))
    there = moved(tensor, "cpu")
    assert torch.equal(there, tensor)
    assert there.data_ptr() != tensor.data_ptr()
    assert (there.stride(), there.storage_offset()) == (tensor.stride(), tensor.storage_offset())
    assert there.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
