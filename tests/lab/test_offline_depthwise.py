"""The depthwise kernels compiled: few registers, vectors, no spill."""

import re
from dataclasses import replace
from functools import cache

import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.depthwise import long_tile as depthwise_long_config
from numba_tconv.kernels.depthwise.direct import DirectConfig
from numba_tconv.kernels.depthwise.long_tile import LongConfig
from numba_tconv.lab.machine_code import offline
from numba_tconv.lab.machine_code.offline import product_loops
from numba_tconv.lab.measure import workloads
from numba_tconv.runtime.device import REGISTERS
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS
from tests.steps import step_of
from tests.thorough import thorough

from .test_offline import AMPERE, BF16, F16, F32, F64, HOPPER, check_memory, check_order, needs_sass

STRIDE_1 = Problem(16, 512, 512, 7, 16384, padding=3, groups=512)
# Reason; problem, dtype, compute capability.
FORWARD = {
    "two taps a phase": (workloads.get("mimi").problem, BF16, HOPPER),
    "on Ampere": (workloads.get("mimi").problem, BF16, AMPERE),
    "float16": (workloads.get("bigvgan_96").problem, F16, HOPPER),
    "six taps a phase": (workloads.get("bigvgan_24").problem, BF16, HOPPER),
    "stride 16": (workloads.get("pocket_tts").problem, BF16, HOPPER),
    "stride 1": (STRIDE_1, F16, HOPPER),
}
forward = pytest.mark.parametrize("reason", thorough(FORWARD, always=("two taps a phase",)))
LOADS = {1: r"ld\.global\.u16", 2: r"ld\.global\.u32", 4: r"ld\.global\.v2\.u32", 8: r"ld\.global\.v4\.u32"}


@cache
def forward_report(reason):
    problem, dtype, cc = FORWARD[reason]
    rung = RUNGS["depthwise"]
    config = rung.config(problem, dtype)
    assert isinstance(config, DirectConfig)
    return config, offline.report(rung.kernel(config), cc, rung.shared_bytes(problem, config))


@forward
def test_forward_stays_in_its_registers(reason):
    config, report = forward_report(reason)
    check_memory(report, 64)
    assert report.shared_bytes == 0
    assert report.blocks_per_multiprocessor >= config.min_blocks


@forward
def test_forward_moves_vectors(reason):
    config, report = forward_report(reason)
    assert len(re.findall(r"\bst\.global\.v4\.u32", report.ptx)) == config.runs
    assert len(re.findall(LOADS[config.granule], report.ptx)) >= config.runs * config.granules


@needs_sass
@forward
def test_forward_converts_by_pairs(reason):
    """A conversion for each pair of outputs, and for single outputs at the ends of a row."""
    config, report = forward_report(reason)
    mix = offline.instructions(report.sass)
    assert mix["STG.E.128"] == config.runs
    assert sum(number for name, number in mix.items() if name.startswith("F2FP")) == 4 * config.runs + 8


def test_float16_needs_no_instruction_of_amperes():
    problem = workloads.get("mimi").problem
    check_memory(offline.report(RUNGS["depthwise"].kernel(RUNGS["depthwise"].config(problem, F16)), (7, 5)), 64)


@needs_sass
@forward
def test_forward_multiplies_as_often_as_it_must(reason):
    """One multiply-add a product, in the quick path and in the path for the ends of rows."""
    config, report = forward_report(reason)
    products = sum(map(len, config.cases))
    assert offline.instructions(report.sass)["FFMA"] == (config.runs + 1) * products


PQMF = workloads.get("pqmf").problem
# Filters too long for registers: reason; problem, dtype, compute capability.
LONG = {
    "float32": (PQMF, F32, HOPPER),
    "bfloat16": (PQMF, BF16, HOPPER),
    "on Ampere": (PQMF, BF16, AMPERE),
    "float16": (PQMF, F16, HOPPER),
    "float64": (PQMF, F64, HOPPER),
    "stride 1, chunks of taps": (Problem(16, 64, 64, 101, 65536, padding=50, groups=64), F32, HOPPER),
    "two outputs, dilation": (Problem(16, 4, 2, 25, 65536, 2, dilation=3), F32, HOPPER),
    "sixteen rows, parts of sums": (Problem(16, 4, 2, 600, 32768, 8), F32, HOPPER),
    "few blocks": (replace(PQMF, length=400), BF16, HOPPER),
    "parts of sums of all chunks": (Problem(16, 8, 4, 33, 65536, 2, padding=20, dilation=3), F32, HOPPER),
}
long_filters = pytest.mark.parametrize("reason", thorough(LONG, always=("sixteen rows, parts of sums",)))


@cache
def long_report(reason):
    problem, dtype, cc = LONG[reason]
    rung = RUNGS["depthwise"]
    config = depthwise_long_config.choose(problem, dtype)
    assert isinstance(config, LongConfig)
    return config, offline.report(rung.kernel(config), cc, rung.shared_bytes(problem, config))


@long_filters
def test_long_filters_stay_in_their_registers(reason):
    config, report = long_report(reason)
    check_memory(report, REGISTERS // (config.threads * config.min_blocks) // 8 * 8)
    assert report.blocks_per_multiprocessor >= config.min_blocks


@needs_sass
@long_filters
def test_long_filters_are_nearly_nothing_but_products(reason):
    """Each product occurs once, beside loads of weights and windows, conversions, and sums."""
    config, report = long_report(reason)
    multiply = "DFMA" if config.dtype == F64 else "FFMA"
    chunks = [config.products(taps) for taps in (config.chunk, config.last_taps)]
    products = sum(map(len, chunks))
    sums = sum(len({s for s, *_ in chunk}) for chunk in chunks) if config.apart and not config.by_channel else 0
    assert offline.instructions(report.sass)[multiply] == products - sums
    mix = max((offline.instructions(loop) for loop in product_loops(report.sass)), key=lambda mix: mix[multiply])
    share = sum(mix[multiply[0] + name] for name in ("FMA", "MUL", "ADD")) / mix.total()
    assert share > (0.88 if products > 500 else 0.75)


@long_filters
def test_long_filters_move_vectors(reason):
    config, report = long_report(reason)
    assert "cp.async.cg.shared.global" in report.ptx
    vector = r"v2\.[ubf]64" if config.dtype == F64 else r"v4\.[ubf]32"
    stores = max(1, config.threads * config.run // (config.active * config.vector))
    found = len(re.findall(rf"\bst\.global\.{vector}", report.ptx))
    assert found in (stores, stores * config.out_per_group)  # the loop over channels may be unrolled
    weights = rf"\bld\.shared\.{vector}"
    assert len(re.findall(weights, report.ptx)) >= config.chunk // 4
    if config.dtype in (F32, F64):
        assert "cvt.f32" not in report.ptx


# Reason; workload, dtype.
GRADIENT_TILES = {
    "float32": ("depthwise", F32),
    "float32, six taps a phase": ("bigvgan_24", F32),
    "float64": ("mimi", F64),
    "bfloat16": ("mimi", BF16),
    "bfloat16, six taps a phase": ("bigvgan_24", BF16),
    "bfloat16, stride 16": ("pocket_tts", BF16),
    "float16": ("mimi", F16),
}
gradients = pytest.mark.parametrize("name", ["grad_input_depthwise", "grad_weight_depthwise"])
gradient_tiles = pytest.mark.parametrize("reason", thorough(GRADIENT_TILES, always=("float32",)))


@cache
def gradient_report(name, reason):
    workload, dtype = GRADIENT_TILES[reason]
    problem = workloads.get(workload).problem
    config = GRADIENTS[name].config(problem, dtype)
    return config, offline.report(step_of(GRADIENTS[name], config, problem).kernel, HOPPER)


@gradients
@gradient_tiles
def test_gradients_stay_in_their_registers(name, reason):
    config, report = gradient_report(name, reason)
    check_memory(report, REGISTERS // (config.threads * config.min_blocks) // 8 * 8)
    check_order(report)
    assert report.blocks_per_multiprocessor >= config.min_blocks


@gradients
@gradient_tiles
def test_gradients_move_vectors(name, reason):
    config, report = gradient_report(name, reason)
    vector = r"v2\.[ubf]64" if config.dtype == F64 else r"v4\.[ubf]32"
    vectors = -(-(config.window + config.vector - 1) // config.vector)
    assert len(re.findall(rf"\bld\.global\.{vector}", report.ptx)) >= vectors
    if name == "grad_input_depthwise" and config.positions == config.vector:
        assert len(re.findall(rf"\bst\.global\.{vector}", report.ptx)) == 1


@needs_sass
@gradients
@gradient_tiles
def test_gradients_multiply_as_often_as_they_must(name, reason):
    """For every alignment of the first element, and once for the ends of rows."""
    config, report = gradient_report(name, reason)
    multiply = "DFMA" if config.dtype == F64 else "FFMA"
    assert offline.instructions(report.sass)[multiply] == len(config.products) * (1 + 8 * config.from_memory)
    assert config.from_memory == (config.dtype in (BF16, F16))
