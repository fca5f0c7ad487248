"""The gradients' kernels compiled, without a GPU: registers, no spill, vector loads, and no atomic."""

import math
import re
from dataclasses import replace
from functools import cache

import pytest

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients import planes
from numba_tconv.gradients.input.tile import choose as grad_input_choose
from numba_tconv.gradients.input.tile import pack as grad_input_pack
from numba_tconv.gradients.weight.split import choose as grad_weight_choose
from numba_tconv.gradients.weight.split.kernel import make_kernel
from numba_tconv.gradients.weight.wgmma import sum as grad_weight_sum
from numba_tconv.kernels.common import rows as row_copy
from numba_tconv.lab.machine_code import offline
from numba_tconv.lab.measure import workloads
from numba_tconv.runtime.device import REGISTERS, RESERVED_SHARED
from numba_tconv.selection.gradient import GRADIENTS
from tests.gpu.common import LARGE
from tests.steps import step_of
from tests.thorough import thorough

from .test_offline import (
    AMPERE,
    BF16,
    DEVICES,
    F16,
    F32,
    F64,
    HOPPER,
    check_memory,
    check_order,
    needs_sass,
    product_loops,
)

# Reason; workload, dtype, compute capability.
TILES = {
    "128 channels, stride 1": ("kb64", F32, HOPPER),
    "the same on Ampere": ("kb64", F32, AMPERE),
    "the widest window": ("kb74", F32, HOPPER),
    "gcd(stride, dilation) = 2": ("kb79", F32, AMPERE),
    "eight phases, partial sums": ("hifigan_u1", F32, HOPPER),
    "two phases on Ampere": ("hifigan_u3", F32, AMPERE),
    "rows of unequal taps": ("seamless_u1", F32, HOPPER),
    "one tap a row": ("patch", F32, HOPPER),
    "phases in parts": ("istft", F32, HOPPER),
    "many taps a row": ("pqmf", F32, HOPPER),
    "depthwise": ("depthwise", F32, AMPERE),
    "a small problem": ("small", F32, HOPPER),
    "float64": ("kb64", F64, HOPPER),
    "float16": ("hifigan_u3", F16, HOPPER),
    "bfloat16": ("kb64", BF16, AMPERE),
}
matrix_products = pytest.mark.parametrize("name", ["grad_input_tile", "grad_weight_split"])
LARGE_TILES = ["128 channels, stride 1", "the same on Ampere", "eight phases, partial sums"]
ALWAYS = ["128 channels, stride 1"]
tiles = pytest.mark.parametrize("reason", thorough(TILES, ALWAYS))
large_tiles = pytest.mark.parametrize("reason", thorough(LARGE_TILES, [r for r in LARGE_TILES if r in ALWAYS]))


@cache
def tile_report(name, reason):
    """The configuration and its main kernel's report."""
    workload, dtype, cc = TILES[reason]
    rung = GRADIENTS[name]
    problem = workloads.get(workload).problem
    config = rung.config(problem, dtype, DEVICES[cc])
    _, kernel, shared_bytes = step_of(rung, config, problem)
    return config, offline.report(kernel, cc, shared_bytes)


def check(report, budget):
    check_memory(report, budget)
    check_order(report)


@matrix_products
@tiles
def test_tiles_stay_in_their_registers(name, reason):
    config, report = tile_report(name, reason)
    check(report, min(255, REGISTERS // (config.threads * config.min_blocks) // 8 * 8))
    assert report.blocks_per_multiprocessor >= config.min_blocks
    assert config.min_blocks >= 2 or config.threads >= 256, "eight warps at least hide each other's latencies"


@matrix_products
@tiles
def test_tiles_load_vectors_and_copy_ahead(name, reason):
    config, report = tile_report(name, reason)
    inner = min(product_loops(report.ptx), key=len)
    assert ("ld.shared.v2.f64" if config.dtype == F64 else "ld.shared.v4.f32") in report.ptx
    assert not re.search(r"\bst\.(global|f32|f64)\b", inner)
    if config.dtype in (F32, F64):
        assert re.search(rf"cp\.async\.ca\.shared\.global [^;]*, {config.itemsize},", report.ptx)
        assert "cp.async.wait_group" in report.ptx


@pytest.mark.parametrize(
    "reason",
    thorough(
        ["128 channels, stride 1", "two phases on Ampere", "depthwise", "float64", "rows of unequal taps"],
        always=["128 channels, stride 1"],
    ),
)
def test_copies_of_16_bytes(reason):
    """grad_weight_split copies aligned input by vectors."""
    workload, _, cc = TILES[reason]
    config = tile_report("grad_weight_split", reason)[0].copying_vectors()
    _, kernel, shared_bytes = step_of(GRADIENTS["grad_weight_split"], config, workloads.get(workload).problem)
    report = offline.report(kernel, cc, shared_bytes)
    check(report, min(255, REGISTERS // (config.threads * config.min_blocks) // 8 * 8))
    assert re.search(r"cp\.async\.cg\.shared\.global [^;]*, 16,", report.ptx)


@needs_sass
@matrix_products
@large_tiles
def test_large_tiles_multiply_most_of_the_time(name, reason):
    """More than four fifths of the inner loop's instructions."""
    inner = min(product_loops(tile_report(name, reason)[1].sass), key=len)
    mix = offline.instructions(inner)
    assert mix["FFMA"] / mix.total() > 0.8


@needs_sass
@matrix_products
@large_tiles
def test_a_stage_is_mostly_products(name, reason):
    """At least two thirds of a stage's instructions, with rare branches."""
    config, report = tile_report(name, reason)
    found = product_loops(report.sass)
    inner, stage = (offline.instructions(pick(found, key=len)) for pick in (min, max))
    if name == "grad_input_tile":
        products = config.pairs * config.tap_chunk * config.thread_m * config.thread_n
    else:
        products = config.sums * config.block_l // config.slices
    turns = products // inner["FFMA"]
    assert products == turns * inner["FFMA"]
    share = products / (turns * inner.total() + stage.total() - inner.total())
    assert share > 2 / 3, share


@needs_sass
@pytest.mark.thorough
@pytest.mark.parametrize("batch", [1, 16])
def test_two_kinds_of_blocks_multiply_as_each_alone(batch):
    """Neither takes registers from the other, and nothing is called."""
    rung = GRADIENTS["grad_weight_split"]
    config = rung.config(replace(workloads.get("seamless_u1").problem, batch=batch), F32).copying_vectors()
    reports = [
        offline.report(make_kernel(c), HOPPER, c.shared_bytes) for c in (config, replace(config, rest_tile=None))
    ]
    for report in reports:
        check(report, min(255, REGISTERS // (config.threads * config.min_blocks) // 8 * 8))
        assert not re.search(r"\bcall\b", report.ptx)
    both, whole = ([offline.instructions(loop) for loop in product_loops(report.sass)] for report in reports)
    assert len(both) == 2 * len(whole) == 4  # a stage's loop and the loop over stages around it
    inner = sorted(both, key=lambda mix: mix.total())[:2]
    turns = [tile.sums * tile.vector * tile.vectors_a_turn for tile in config.tiles]
    assert sorted(mix["FFMA"] for mix in inner) == sorted(turns)
    assert all(mix["FFMA"] / mix.total() > 0.85 for mix in inner)
    most = max(mix.total() for mix in inner)
    assert most <= 1.02 * min(mix.total() for mix in whole)


# Reason; gradient, workload, precision.
ON_TENSOR_CORES = {
    "three taps, 192 sums": ("grad_weight_wgmma", "kb64", "tf32"),
    "words at odd places": ("grad_weight_wgmma", "kb74", "bf16"),
    "two phases, elements one by one": ("grad_weight_wgmma", "hifigan_u3", "bf16"),
    "eight phases in pieces": ("grad_weight_wgmma", "dac_u1", "tf32"),
    "rows that begin unlike, cleared": ("grad_weight_wgmma", "kb79", "bf16"),
    "sums stored as the gradient": ("grad_weight_wgmma", "oobleck_u1", "bf16"),
    "tiles in turn": ("grad_input_wgmma", "hifigan_u3", "tf32"),
    "positions of one tile": ("grad_input_wgmma", "dac_u1", "tf32"),
    "16-bit elements in words": ("grad_input_wgmma", "hifigan_u1", "fp16"),
    "three taps, rows of eight kinds, cleared": ("grad_input_wgmma", "kb79", "bf16"),
    "eleven taps, stages run through": ("grad_input_wgmma", "seamless_u1", "tf32"),
    "eleven taps, every second row alike, cleared": ("grad_input_wgmma", "seamless_u1", "bf16"),
    "ten taps, every eighth row alike": ("grad_input_wgmma", "encodec_u2", "bf16"),
    "four taps, every fourth row alike": ("grad_input_wgmma", "encodec_u4", "bf16"),
}


@pytest.mark.parametrize(
    "reason",
    thorough(
        ON_TENSOR_CORES,
        always=("three taps, 192 sums",),
    ),
)
def test_gradients_on_tensor_cores(reason):
    """All in registers, whose number a warpgroup changes later; ptxas inserts no waits between products."""
    name, workload, precision = ON_TENSOR_CORES[reason]
    rung, dtype, problem = GRADIENTS[name], DTYPES[precision], workloads.get(workload).problem
    _, kernel, shared_bytes = step_of(rung, rung.config(problem, dtype, precision=precision), problem)
    report = offline.report(kernel, HOPPER, shared_bytes)
    check(report, 168)
    assert "wgmma.mma_async.sync.aligned" in report.ptx
    assert "cp.async.bulk.tensor.3d" in report.ptx
    if report.sass:
        assert "HGMMA" in report.sass
        assert "warpgroup.arrive is injected" not in report.log
        assert "serialized" not in report.log


@needs_sass
@pytest.mark.thorough
@pytest.mark.parametrize(("workload", "precision"), [("seamless_u1", "tf32"), ("encodec_u2", "bf16")])
def test_a_stage_that_runs_through_costs_eight_loads(workload, precision):
    """Positions come from a table: no division, no masks."""
    rung, problem = GRADIENTS["grad_input_wgmma"], workloads.get(workload).problem
    config = rung.config(problem, DTYPES[precision], precision=precision)
    _, kernel, shared_bytes = step_of(rung, config, problem)
    loops = [loop for loop in offline.loops(offline.report(kernel, HOPPER, shared_bytes).sass) if "HGMMA" in loop]
    stage, operands = offline.instructions(min(loops, key=len)), 16 * config.blocks
    assert config.through
    assert stage["HGMMA.64"] == 4 * config.blocks
    if config.halves:
        assert (stage["LDS.U16"], stage["LDS.64"], stage["LDS"]) == (2 * operands, 8, 0)
    else:
        assert (stage["LDS.U16"], stage["LDS.64"], stage["LDS"]) == (0, 0, operands + 8)
    # An address and a load for each element, a word for two; the table; and the stage's own.
    elements = 2 * operands if config.halves else operands
    assert stage.total() < 2 * elements + (operands if config.halves else 0) + 8 + 4 * config.blocks + 64


SIMPLE = [
    (name, dtype, cc)
    for name in ("grad_input_gather", "grad_bias")
    for dtype, cc in ((F32, HOPPER), (F64, AMPERE), (F16, HOPPER), (BF16, AMPERE))
]


@pytest.mark.parametrize(
    ("name", "dtype", "cc"), thorough(SIMPLE, always=[case for case in SIMPLE if case[1] in (F32, BF16)])
)
def test_simple_kernels_stay_in_their_registers(name, dtype, cc):
    rung, problem = GRADIENTS[name], workloads.get("kb79").problem
    _, kernel, shared_bytes = step_of(rung, rung.config(problem, dtype), problem)
    check(offline.report(kernel, cc, shared_bytes), 64)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_kernels_beside_those_on_tensor_cores_stay_in_their_registers(dtype):
    for workload in ("kb79", "seamless_u1", "waveglow"):
        config = planes.make_config(workloads.get(workload).problem, dtype)
        check(offline.report(planes.make_kernel(config), HOPPER), 64)
    in_float64 = planes.make_config(workloads.get("hifigan_u1").problem, F64)
    check(offline.report(planes.make_kernel(in_float64), HOPPER), 64)
    check(offline.report(row_copy.make_kernel(dtype), HOPPER), 40)
    for config in grad_weight_sum.configs(dtype):
        check(offline.report(grad_weight_sum.make_kernel(config), HOPPER), 80)
    rung, problem = GRADIENTS["grad_input_planes"], workloads.get("hifigan_u3").problem
    check(offline.report(step_of(rung, rung.config(problem, dtype), problem, "pack").kernel, HOPPER), 64)


@needs_sass
@pytest.mark.parametrize("dtype", thorough([F32, BF16], always=[BF16]), ids=str)
def test_squares_of_long_strides_are_loaded_before_they_are_turned(dtype):
    """A thread's vectors are all loaded together; from shared memory, vectors go to the planes."""
    report = offline.report(planes.make_kernel(planes.make_config(workloads.get("waveglow").problem, dtype)), HOPPER)
    check(report, 56)
    assert report.occupancy > 0.5
    vector = 16 // dtype.itemsize
    loads = [found.start() for found in re.finditer(r"\bLDG\.E\.128\b", report.sass)]
    assert len(loads) == vector
    barrier = report.sass.index("BAR.SYNC")
    while_loading, turning, afterwards = (
        offline.instructions(report.sass[begin:end])
        for begin, end in ((loads[0], loads[-1]), (loads[-1], barrier), (barrier, None))
    )
    assert not any(name.startswith(("PRMT", "STS", "STG")) for name in while_loading)
    assert turning["STS.128"] == vector
    assert turning.total() < 20 * vector
    assert not any(name.startswith("STG") for name in while_loading + turning)
    assert {name for name in afterwards if name.startswith(("LDG", "LDS", "ST"))} == {"LDS.128", "STG.E.128"}


@pytest.mark.parametrize("dtype", thorough([F32, F64, F16, BF16], always=[F32, BF16]), ids=str)
def test_the_kernels_beside_them_stay_in_their_registers(dtype):
    problem, of_bias = workloads.get("kb79").problem, GRADIENTS["grad_bias"]
    config = grad_input_choose.choose(problem, dtype)
    second_stage = step_of(of_bias, of_bias.config(problem, dtype), problem, "add up").kernel
    for kernel in (grad_input_pack.make_kernel(config, config.overlaps_packing), second_stage):
        check(offline.report(kernel, HOPPER), 64)


NAMED = list(workloads.WORKLOADS.values())


@pytest.mark.parametrize("dtype", thorough([F32, F64], always=[F32]), ids=str)
@pytest.mark.parametrize("cc", thorough(DEVICES, always=[HOPPER], tuples=True))
@pytest.mark.parametrize("named", [NAMED[::3], pytest.param(NAMED, marks=pytest.mark.thorough)], ids=["a third", "all"])
def test_every_workload_has_a_tile(dtype, cc, named):
    device = DEVICES[cc]
    for workload in named:
        problem = workload.problem
        for config in (
            grad_input_choose.choose(problem, dtype, device),
            grad_weight_choose.choose(problem, dtype, device),
        ):
            need = config.shared_bytes + RESERVED_SHARED
            assert 1 <= config.min_blocks <= device.shared_per_multiprocessor // need, workload.name
            assert config.min_blocks >= 2 or config.threads >= 256, workload.name


SUMS = {
    "sixteen slices, long": Problem(64, 37, 53, 7, 40_000, stride=3, dilation=5),
    **LARGE,
    **{name: workload.problem for name, workload in workloads.WORKLOADS.items()},
}
# Most products of a float32 sum whose error is at most twice torch's.
MOST_TERMS = 128


@pytest.mark.parametrize("reason", thorough(SUMS, always=[*SUMS][::3]))
def test_float32_sums_are_short(reason):
    """A sum's error grows with its length, and with the number of partial sums."""
    problem = SUMS[reason]
    config = grad_input_choose.choose(problem, F32)
    depth = problem.out_channels_per_group * problem.kernel_size
    depth //= config.splits
    terms = config.partial * config.channels * config.channel_taps if config.partial else depth
    most_terms = MOST_TERMS * (2 if depth >= 4 * MOST_TERMS else 1)
    assert terms <= max(most_terms, math.isqrt(depth))
    assert depth / terms <= max(MOST_TERMS, 2 * math.isqrt(depth))  # the partial sums are added, too

    config = grad_weight_choose.choose(problem, F32)
    splits, length = grad_weight_choose.splits_of(problem, config)
    assert (splits - 1) * length < config.stages(problem) <= splits * length
    for tile in config.tiles:
        length = -(-tile.stages(problem) // splits)
        a_stage = tile.block_l // tile.slices  # products of a thread for each of its sums
        assert (tile.partial or length) * a_stage <= MOST_TERMS
        assert length * a_stage <= MOST_TERMS**2 / 2
