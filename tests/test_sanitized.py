"""The problems for compute-sanitizer (gpu/sanitized.py) reach every code path that sizes decide; on the CPU."""

import itertools
import math

import pytest
import torch

from numba_tconv.formula.precision import DTYPES
from numba_tconv.kernels.common.tensor_core.store_any import alignment_of
from numba_tconv.kernels.depthwise import direct as depthwise_direct
from numba_tconv.kernels.depthwise import long_tile as depthwise_long_config
from numba_tconv.kernels.depthwise import tile as depthwise_config
from numba_tconv.kernels.k4_register_tile import choose as k4_choose
from numba_tconv.kernels.k4_register_tile.plan import vector_of
from numba_tconv.kernels.k5_dmma import tile as k5_dmma_config
from numba_tconv.kernels.k5_mma import choose as k5_choice
from numba_tconv.kernels.k5_mma.epilogue import gaps_between
from numba_tconv.runtime import device
from numba_tconv.runtime.layout import Layout
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS

from .gpu.common import TENSOR_CORES
from .gpu.sanitized import MULTIPROCESSORS, Forward, as_if_large, cases, moved
from .parity import LAYOUTS, operands, parameters

pytestmark = pytest.mark.skipif(not TENSOR_CORES, reason="the simulator has no tensor cores")

BOTH = {False, True}
SHAPES = {"whole", "part", "single"}


@pytest.fixture(scope="module", autouse=True)
def small_gpu():
    with as_if_large():
        yield


def of_rung(name):
    found = [case for case in cases() if case.rung == name]
    assert found
    return found


def shape_of(tile):
    """One of SHAPES (kernels/common/tensor_core/tile.py)."""
    return "whole" if tile.whole else "part" if tile.dilation == 1 else "single"


def input_of(case):
    """x as it lies in memory, and the bytes from a multiple of 16 to its first element."""
    x = operands(case.problem, case.dtype, layout=case.layout)[0]
    return x, x.storage_offset() * x.itemsize % 16


def values(properties):
    """The values that occur, for each property."""
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


# k5


def k5(case):
    x, offset = input_of(case)
    return k5_choice.config_of(case.problem, case.precision, device.current_device(), x.shape, x.stride(), offset)


def _in_words(case, config):
    """Whether windows lie within a sample's signal, and whole stages in its channels."""
    p, (x, _) = case.problem, input_of(case)
    short = p.length < config.width + 2 or p.in_channels_per_group < config.depth
    return config.by_words and not short and x.stride(2) == 1


def _within_a_word(case):
    """Whether even and odd channels of the first sample begin within a word."""
    x, offset = input_of(case)
    return offset // 2 % 2 == 1, (offset // 2 + x.stride(1)) % 2 == 1


def k5_properties(case):
    config, p = k5(case), case.problem
    tile, resident = config.tile, config.resident_weights > 0
    return {
        "shape": shape_of(tile),
        "whole, empty slots": tile.whole and tile.has_gaps,
        "single, empty slots": not tile.whole and tile.dilation > 1 and tile.has_gaps,
        "parts, words": (tile.operand_halves, config.by_words),
        "weights, size of an element, words": (resident, tile.itemsize, config.by_words),
        "windows in words: weights, size of an element": _in_words(case, config) and (resident, tile.itemsize),
        "channels within a word: weights, even, odd": config.shifted and (resident, *_within_a_word(case)),
        "weights, parts": (resident, tile.operand_halves),
        "weights, size of an element": (resident, tile.itemsize),
        "weights, chunks of taps": (resident, tile.several_chunks),
        "weights, row tiles": (resident, tile.row_tiles(p) > 1),
        "weights, groups": (resident, p.groups > 1),
        "weights, zeros first": (resident, tile.has_gaps and not gaps_between(tile)),
        "several tiles of a team": config.resident_weights > 0
        and tile.column_tiles(p) > MULTIPROCESSORS * config.teams,
        "rows in rounds: weights, parts": config.by_rows and (resident, tile.operand_halves),
        "rows in rounds: buffers": config.by_rows and config.staging_buffers,
        "chunks of taps": tile.several_chunks,
        "precision": case.precision,
        "tiles of a block": config.tiles > 1,
        "split operands, a phase, six warps": tile.operand_halves == 2 and tile.span == 1 and config.tile_warps == 6,
        "chunks of a stage": config.chunks > 1,
        "rounds": tile.rounds > 1,
        "row tiles": tile.row_tiles(p) > 1,
        "channels that do not exist": p.in_channels_per_group % config.depth > 0,
        "outputs at a time, size": tile.whole and (math.gcd(4, p.out_length), tile.itemsize),
        "runs on sectors, weights, size of an element": tile.whole and (tile.aligned, resident, tile.itemsize),
        "runs that begin anywhere: outputs at a time": tile.whole
        and not tile.aligned
        and alignment_of(case.offset * tile.itemsize, p, tile, gaps_between(tile))[1],
        "y within a sector": case.offset > 0,
        "layout": case.layout,
    }


def test_k5():
    assert values(map(k5_properties, of_rung("k5_mma"))) == {
        "shape": SHAPES,
        "whole, empty slots": BOTH,
        "single, empty slots": BOTH,
        "parts, words": {(parts, words) for parts in (1, 2) for words in BOTH},
        "weights, size of an element, words": set(itertools.product(BOTH, (2, 4), BOTH)),
        "windows in words: weights, size of an element": {False, *itertools.product(BOTH, (2, 4))},
        "channels within a word: weights, even, odd": {False, *itertools.product(BOTH, BOTH, BOTH)},
        "weights, parts": {(resident, parts) for resident in BOTH for parts in (1, 2)},
        "runs on sectors, weights, size of an element": {False}
        | {(True, resident, size) for resident in BOTH for size in (2, 4)}
        | {(False, resident, 4) for resident in BOTH},
        "runs that begin anywhere: outputs at a time": {False, 1, 2, 4},
        "weights, size of an element": {(resident, size) for resident in BOTH for size in (2, 4)},
        "weights, chunks of taps": {(resident, several) for resident in BOTH for several in BOTH},
        "weights, row tiles": {(resident, several) for resident in BOTH for several in BOTH},
        "weights, groups": {(resident, several) for resident in BOTH for several in BOTH},
        "weights, zeros first": {(resident, zeros) for resident in BOTH for zeros in BOTH},
        "several tiles of a team": BOTH,
        "rows in rounds: weights, parts": {False} | {(resident, parts) for resident in BOTH for parts in (1, 2)},
        "rows in rounds: buffers": {False, 1, 2},
        "chunks of taps": BOTH,
        "precision": set(DTYPES),
        "tiles of a block": BOTH,
        "split operands, a phase, six warps": BOTH,
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
    x_vector = vector_of(Layout.of(x)._replace(offset=offset))
    config = case.config or k4_choose.choose(case.problem, case.dtype, x_vector, device.current_device())
    return {
        "copies": config.x_vector,
        "vectors of outputs": config.y_vector > 1 and not case.offset,
        "chunks of taps": config.several_chunks,
        "ragged, of one phase": (config.ragged, config.one_phase),
        "whole stages": config.whole_chunks,
        "partial sums": config.partial > 0,
        "stages": config.stages,
        "gaps": config.taps.gap > 1,
        "dtype": case.dtype,
    }


def test_k4():
    assert values(map(k4_properties, of_rung("k4_register_tile"))) == {
        "copies": {1, 2, 4},
        "vectors of outputs": BOTH,
        "chunks of taps": BOTH,
        "ragged, of one phase": {(False, False), (True, False), (True, True)},
        "whole stages": BOTH,
        "partial sums": BOTH,
        "stages": {2, 3},
        "gaps": BOTH,
        "dtype": {torch.float32, torch.float64},
    }


def k5_dmma_properties(case):
    x, offset = input_of(case)
    x_vector = vector_of(Layout.of(x)._replace(offset=offset))
    config = case.config or k5_dmma_config.choose(case.problem, x_vector, device.current_device())
    stages = config.channel_chunks(case.problem) * config.tap_chunks(case.problem)
    return {
        "copies": config.x_vector,
        "channels of a product": config.depth,
        "ring, copies": (config.ring, config.x_vector),
        "ring, stages that come again": config.ring and stages > config.stages,
        "vectors of outputs": config.y_vector > 1 and not case.offset,
        "chunks of taps": config.several_chunks,
        "ragged": config.ragged,
        "whole stages": config.whole_chunks,
        "gaps": config.taps.gap > 1,
    }


def test_k5_dmma():
    found = values(map(k5_dmma_properties, of_rung("k5_dmma")))
    assert found.pop("copies") == {1, 2}
    assert found.pop("channels of a product") == {4, 8}
    assert found.pop("ring, copies") == set(itertools.product(BOTH, (1, 2)))
    assert all(occurring == BOTH for occurring in found.values()), found


def depthwise_properties(case):
    """Properties of cases with inputs in shared memory."""
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
    """Properties of cases with inputs in registers."""
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


def long_properties(case):
    """Properties of cases with weights and inputs in shared memory."""
    p = case.problem
    config = case.config or RUNGS["depthwise"].config(p, case.dtype)
    x, offset = input_of(case)
    aligned = x.stride(2) == 1 and (config.in_per_group == 1 or x.stride(1) % config.vector == 0)
    first, size = p.padding // p.stride - config.halo, config.dtype.itemsize
    # Blocks of a row whose windows lie in the signal, with outputs in the row.
    within = [
        at
        for at in range(depthwise_long_config.plan(p, config)[1])
        if first + at * config.span >= config.vector and first + at * config.span + config.width <= p.length
    ]
    return {
        "dtype, copies by vectors": (case.dtype, aligned),
        "dtype, bias": (case.dtype, p.bias),
        "dtype, y past 16 bytes": (case.dtype, case.offset > 0),
        "x past 16 bytes": offset > 0,
        "elements of x, positions apart": x.stride(2) > 1 and size,
        "a block within the row, by vectors": aligned and len(within) > 0,
        "several full chunks": config.full_chunks > 1,
        "last taps": config.last_taps > 0,
        "apart": config.apart,
        "by channel": config.by_channel,
        "gaps": config.taps.gap > 1,
        "ragged": config.taps.kernel_size % config.taps.rows > 0,
        "outputs of a group": config.out_per_group > 1,
        "groups of copies": -(-config.in_per_group // config.batch) > 1,
        "weights in several rounds": config.in_per_group * config.weight_pitch > 4 * config.threads,
        "threads that store nothing": config.active < config.threads,
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


def test_depthwise_of_long_filters():
    found = values(map(long_properties, depthwise_cases(depthwise_long_config.LongConfig)))
    dtypes = torch.float64, torch.float32, torch.float16, torch.bfloat16
    for name in ("dtype, copies by vectors", "dtype, bias", "dtype, y past 16 bytes"):
        assert found.pop(name) == {(dtype, either) for dtype in dtypes for either in BOTH}, name
    assert found.pop("elements of x, positions apart") == {False, 2, 4}
    assert all(occurring == BOTH for occurring in found.values()), found


# The script's use of a result


def torchs(self, x, w, bias, y, problem, config=None, precision=None):
    """Replaces a rung's ``run``."""
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
