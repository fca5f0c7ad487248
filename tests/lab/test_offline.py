"""Every rung compiled, without a GPU: registers, no spill, and the rung's own instructions.

Without them results would be right, but slow; no other test would notice.
"""

import os
import re
import statistics
import time
from functools import cache, lru_cache
from unittest import mock

import pytest
import torch

from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.kernels.depthwise import tile as depthwise_config
from numba_tconv.kernels.k4_register_tile.choose import candidates, choose
from numba_tconv.kernels.k5_mma import choose as k5_choice
from numba_tconv.kernels.k5_mma.tile import RUN
from numba_tconv.kernels.k6_wgmma.epilogue.staging import BATCH
from numba_tconv.lab.machine_code import offline
from numba_tconv.lab.machine_code.offline import product_loops
from numba_tconv.lab.measure import workloads
from numba_tconv.runtime import cache as disk
from numba_tconv.runtime.device import A100, H200, REGISTERS, RESERVED_SHARED, Device
from numba_tconv.selection.registry import RUNGS
from tests.thorough import thorough

needs_sass = pytest.mark.skipif(not offline.tool("nvdisasm", optional=True), reason="needs nvdisasm")

AMPERE, HOPPER = (8, 0), (9, 0, "a")
DEVICES = {AMPERE: A100, HOPPER: H200}
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

# Two, four and four blocks of 256 threads fit on a multiprocessor.
BUDGETS = {"k1_gather": 128, "k2_polyphase": 64, "k3_shared_tile": 64}
SIMPLE = [
    (rung, "kb79", dtype, cc)
    for rung in BUDGETS
    for dtype, cc in ((F32, AMPERE), (F32, HOPPER), (F64, HOPPER), (F16, HOPPER), (BF16, AMPERE))
]
# k4 compiles for seconds: only chosen tiles, with copies of 16 bytes and of one element.
SEVERAL_PHASES = "unequal taps, several phases a block"
TILES = {
    "128 channels, stride 1": ("kb64", F32, 4, HOPPER),
    "the same on Ampere": ("kb64", F32, 4, AMPERE),
    "strided and dilated, three blocks on Ampere": ("kb79", F32, 4, AMPERE),
    "the widest window": ("kb74", F32, 4, HOPPER),
    "single-element copies": ("kb79", F32, 1, HOPPER),
    "eight phases, partial sums": ("hifigan_u1", F32, 4, AMPERE),
    "the most channels": ("dac_u1", F32, 1, HOPPER),
    "depthwise": ("depthwise", F32, 4, AMPERE),
    "unequal taps, a phase a block": ("seamless_u1", F32, 4, HOPPER),
    "the same on Ampere, copies of two elements": ("seamless_u1", F32, 2, AMPERE),
    SEVERAL_PHASES: ("seamless_u1", F32, 4, HOPPER),
    "copies of two elements": ("encodec_u1", F32, 2, HOPPER),
    "few columns": ("waveglow@batch1", F32, 1, HOPPER),
    "12 x 12 sums a thread": ("oobleck_u1@batch1", F32, 4, HOPPER),
    "as many, in four parts": ("hifigan_u1@batch1", F32, 4, HOPPER),
    "few sums": ("small", F32, 4, HOPPER),
    "float64": ("kb64", F64, 2, HOPPER),
    "float64, depthwise, single-element copies": ("depthwise", F64, 1, AMPERE),
}
K3 = ("k3_shared_tile", "kb79", F32, HOPPER)
simple = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case[0]}-{case[2]}-sm_{''.join(map(str, case[3]))}",
            marks=() if case[2:] in ((F32, HOPPER), (BF16, AMPERE)) else pytest.mark.thorough,
        )
        for case in SIMPLE
    ],
)
tiles = pytest.mark.parametrize(
    "reason",
    thorough(
        TILES,
        always=("128 channels, stride 1",),
    ),
)


@cache
def simple_report(case):
    name, workload, dtype, cc = case
    rung, problem = RUNGS[name], workloads.get(workload).problem
    config = rung.config(problem, dtype)
    return offline.report(rung.kernel(config), cc, rung.shared_bytes(problem, config))


def tile(reason):
    """k4's configuration for a row of TILES."""
    workload, dtype, x_vector, cc = TILES[reason]
    name, _, batch = workload.partition("@batch")
    problem = workloads.expand([name], int(batch) if batch else None)[0].problem
    config = choose(problem, dtype, x_vector, DEVICES[cc])
    assert config.x_vector == x_vector
    if reason != SEVERAL_PHASES:
        return config
    assert config.one_phase, "few channels leave it otherwise"
    return next(c for c in candidates(problem, dtype, x_vector, DEVICES[cc]) if not c.one_phase)


@cache
def tile_report(reason):
    return offline.report(RUNGS["k4_register_tile"].kernel(tile(reason)), TILES[reason][3])


def check_order(report):
    """No atomic, whose order is undefined."""
    assert not re.search(r"\b(atom|red)\.", report.ptx)


def check_memory(report, budget):
    """Everything stays in at most ``budget`` registers."""
    assert 0 < report.registers <= budget
    assert report.spill_bytes == 0
    assert report.local_bytes == 0
    assert ".local" not in report.ptx
    assert not re.search(r"\.ftz\b", report.ptx), "numbers below the smallest normal one are kept"


@simple
def test_simple_rungs_stay_in_their_registers(case):
    check_memory(simple_report(case), BUDGETS[case[0]])


@simple
def test_simple_rungs_are_what_they_claim(case):
    ptx = simple_report(case).ptx
    inner = min(product_loops(ptx), key=len)
    if case[0] == "k1_gather":  # its stride is known at run time only
        assert any(re.search(r"\brem\.s64\b", loop) for loop in product_loops(ptx))
    elif case[0] == "k2_polyphase":
        assert re.search(r"\bdiv\.s64\b", ptx), "the phase is worked out somewhere"
        assert not any(re.search(r"\b(rem|div)\.", loop) for loop in product_loops(ptx))
        assert re.search(r"\bld\.global\b", inner)
    else:
        assert "st.shared" in ptx
        assert "bar.sync" in ptx
        assert "ld.shared" in inner
        assert not re.search(r"\bld\.(global|f32|f64|u16|b16)\b", inner), "the inner loop reads shared memory only"


@tiles
def test_k4_stays_in_its_registers(reason):
    config = tile(reason)
    # Blocks share a multiprocessor's registers, in units of eight a thread, at most 255.
    share = REGISTERS // (config.threads * config.min_blocks) // 8 * 8
    check_memory(tile_report(reason), min(255, share))


@pytest.mark.parametrize("device", [A100, Device((8, 6), 84, 100 * 1024)], ids=["A100", "RTX 3090"])
def test_k4_has_a_tile_for_less_shared_memory(device):
    for workload in workloads.WORKLOADS.values():
        for dtype, x_vector in ((F32, 1), (F32, 4), (F64, 1), (F64, 2)):
            config = choose(workload.problem, dtype, x_vector, device)
            needs = config.shared_bytes + RESERVED_SHARED
            assert 2 <= config.min_blocks <= device.shared_per_multiprocessor // needs, workload.name


@tiles
def test_k4_copies_ahead_and_loads_vectors(reason):
    config, ptx = tile(reason), tile_report(reason).ptx
    size = config.x_vector * config.itemsize
    assert re.search(r"cp\.async\.cg\.shared\.global [^;]*, 16,", ptx), "weights"
    assert re.search(rf"cp\.async\.c[ag]\.shared\.global [^;]*, {size},", ptx), "input"
    assert "cp.async.wait_group" in ptx
    inner = min(product_loops(ptx), key=len)
    assert ("ld.shared.v2.f64" if config.dtype == F64 else "ld.shared.v4.f32") in inner
    if config.block_k > 2:  # otherwise a stage's copies are in the same loop
        assert not re.search(r"\b(ld|st)\.(global|f32|f64)\b|\bbar\.sync\b", inner)


@needs_sass
@tiles
def test_k4_machine_code(reason):
    report = tile_report(reason)
    assert any(name.startswith("LDGSTS") for name in report.instruction_mix)
    assert "LDS.128" in min(product_loops(report.sass), key=len)


@needs_sass
@pytest.mark.parametrize(
    "reason", thorough(["128 channels, stride 1", "the same on Ampere"], always=["128 channels, stride 1"])
)
def test_k4_multiplies_most_of_the_time(reason):
    """More than nine tenths of the inner loop's instructions."""
    inner = min(product_loops(tile_report(reason).sass), key=len)
    mix = offline.instructions(inner)
    assert mix["FFMA"] / mix.total() > 0.9


# Depthwise, inputs in shared memory: reason; workload, dtype, compute capability.
FEW_CHANNELS = {
    "float32": ("depthwise", F32, HOPPER),
    "on Ampere": ("depthwise", F32, AMPERE),
    "six taps a phase": ("bigvgan_24", F32, HOPPER),
    "stride 16": ("pocket_tts", F32, AMPERE),
    "float64": ("mimi", F64, HOPPER),
    "float16, stride 16": ("pocket_tts", F16, HOPPER),
    "bfloat16": ("mimi", BF16, AMPERE),
    "more weights than registers": ("pqmf", F32, HOPPER),
}
few_channels = pytest.mark.parametrize(
    "reason",
    thorough(FEW_CHANNELS, always=("on Ampere", "float16, stride 16")),
)


@cache
def depthwise_report(reason):
    name, dtype, cc = FEW_CHANNELS[reason]
    rung, problem = RUNGS["depthwise"], workloads.get(name).problem
    config = depthwise_config.choose(problem, dtype)
    return config, offline.report(rung.kernel(config), cc, rung.shared_bytes(problem, config))


@few_channels
def test_depthwise_stays_in_its_registers(reason):
    config, report = depthwise_report(reason)
    check_memory(report, REGISTERS // (config.threads * config.min_blocks) // 8 * 8)
    assert report.blocks_per_multiprocessor >= config.min_blocks
    assert config.keeps_weights == (reason != "more weights than registers")


@few_channels
def test_depthwise_moves_vectors(reason):
    config, report = depthwise_report(reason)
    vector = {F32: r"v4\.[fbu]32", F64: r"v2\.[fbu]64"}.get(config.dtype, r"v4\.[bu]32")
    assert re.search(rf"\bld\.global\.{vector}", report.ptx)
    assert re.search(rf"\bst\.global\.{vector}", report.ptx)
    assert "bar.sync" in report.ptx
    inner = min(product_loops(report.ptx), key=len)
    assert "ld.shared" in inner
    if config.keeps_weights:  # the inner loop is a pass: from shared memory to the output
        assert re.search(rf"\bst\.global\.{vector}", inner)
        assert "ld.global" not in inner


@needs_sass
@few_channels
def test_depthwise_has_few_instructions_an_output(reason):
    """Few in a pass, with the rarely taken branch for the end of a row."""
    config, report = depthwise_report(reason)
    if config.keeps_weights:
        products = config.vector * config.in_per_group * config.taps.taps_per_row
        inner = offline.instructions(min(product_loops(report.sass), key=len))
        assert inner.total() < 2 * products + 10 * config.vector
        assert any(name.startswith("STG.E") for name in inner)
        if config.dtype in (F32, F64):
            assert "STG.E.128" in inner


# Tensor-core rungs: workload, precision.
MATRIX_PRODUCTS = [
    *[(workload, "tf32") for workload in ("kb64", "kb79", "hifigan_u1")],
    *[("kb64", "tf32x3"), ("kb74", "tf32x3"), ("oobleck_u4", "bf16"), ("xcodec_u1", "fp16")],
]
OPERANDS = {"tf32": "tf32", "tf32x3": "f16", "fp16": "f16", "bf16": "bf16"}
# Compile times in k3's, timed beside them, as seconds depend on other work.
LONGEST_COMPILATION = 13
BESIDE = 20  # seconds in which other work stays much the same
# The multiplying instruction, in PTX and in SASS.
MULTIPLIERS = {"k5_mma": ("mma.sync", "HMMA"), "k6_wgmma": ("wgmma.mma_async", "HGMMA")}
EVERY_MATRIX_PRODUCT = [
    *((name, *case) for name in MULTIPLIERS for case in MATRIX_PRODUCTS),
    # A tile with a share of a long stride's phases, stored from registers; partial sums in bfloat16.
    *(("k6_wgmma", *case) for case in (("waveglow", "bf16"), ("waveglow", "tf32x3"), ("head", "bf16"))),
]
# `make test` compiles these.
ALWAYS = [("k5_mma", "kb74", "tf32x3"), ("k6_wgmma", "hifigan_u1", "tf32")]
matrix_products = pytest.mark.parametrize(
    ("name", "workload", "precision"), thorough(EVERY_MATRIX_PRODUCT, always=ALWAYS)
)


def without_cache():
    """Compiled kernels are not taken from the disk."""
    return mock.patch.dict(os.environ, {"NUMBA_TCONV_CACHE": ""})


@lru_cache(1)
def k3_seconds(when):
    """Processor time that k3 takes to compile now, after a first compilation."""
    simple_report(K3)
    with without_cache():
        before = sum(os.times()[:4])
        simple_report.__wrapped__(K3)
        return sum(os.times()[:4]) - before


@cache
def matrix_report(name, workload, precision):
    """The configuration, its report, and its compile time in k3's."""
    simpler = k3_seconds(time.monotonic() // BESIDE)
    rung, problem = RUNGS[name], workloads.get(workload).problem
    config = rung.config(problem, next(d for d, known in PRECISIONS.items() if precision in known), precision)
    kernel = rung.kernel(config)
    with without_cache():
        before = sum(os.times()[:4])
        report = offline.report(kernel, HOPPER, rung.shared_bytes(problem, config))
        seconds = sum(os.times()[:4]) - before
    disk.ptx(kernel.name, kernel.key, HOPPER, lambda: report.ptx)  # for the tests of other files
    return config, report, seconds / simpler


@matrix_products
def test_tensor_core_rungs_stay_in_their_registers(name, workload, precision):
    config, report, _ = matrix_report(name, workload, precision)
    blocks = getattr(config, "min_blocks", 1)
    check_memory(report, min(255, REGISTERS // (report.threads * blocks) // 8 * 8))
    assert report.blocks_per_multiprocessor >= blocks
    if name == "k6_wgmma":  # with a margin: another version of Python gives other PTX
        grows = re.compile(r"(setmaxnreg\.inc\.sync\.aligned\.u32 )(\d+)")
        ptx, replaced = grows.subn(lambda found: f"{found[1]}{int(found[2]) - 8}", report.ptx)
        assert replaced
        assert offline.report(RUNGS[name].kernel(config), HOPPER, ptx=ptx).spill_bytes == 0


@matrix_products
def test_tensor_core_rungs_multiply_on_tensor_cores(name, workload, precision):
    _, report, _ = matrix_report(name, workload, precision)
    word, sass = MULTIPLIERS[name]
    kind = OPERANDS[precision]
    assert re.search(rf"\b{word}\.\S*\.f32\.{kind}\.{kind}\b", report.ptx)
    # ptxas warns and waits between asynchronous products where it cannot prove that their registers are free.
    assert "serialized" not in report.log
    check_order(report)  # grad_input_planes runs them too
    if report.sass:
        assert any(instruction.startswith(sass) for instruction in report.instruction_mix)


@pytest.mark.thorough
@pytest.mark.parametrize(("workload", "resident"), [("kb74", True), ("hifigan_u1", False)])
def test_k5_compiles_for_ampere(workload, resident):
    """With resident and with streamed weights."""
    rung, problem = RUNGS["k5_mma"], workloads.get(workload).problem
    config = rung.config_on(A100, problem, F32, "tf32")
    assert (config.resident_weights > 0) == resident
    report = offline.report(rung.kernel(config), AMPERE, rung.shared_bytes(problem, config))
    assert report.spill_bytes == 0
    assert report.blocks_per_multiprocessor >= config.min_blocks
    assert "mma.sync.aligned.m16n8k8" in report.ptx


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("workload", "precision", "resident"), [("kb74", "tf32", True), ("kb64", "bf16", True), ("dac_u3", "bf16", False)]
)
def test_k5_copies_rows_that_begin_anywhere_in_words(workload, precision, resident):
    """Without a spill; only the ends of a signal are copied by elements."""
    config = k5_choice.choose(workloads.get(workload).problem, precision, aligned=False)
    assert (config.resident_weights > 0) == resident
    report = offline.report(RUNGS["k5_mma"].kernel(config), HOPPER, config.shared_bytes)
    assert report.spill_bytes == 0
    assert report.blocks_per_multiprocessor >= config.min_blocks
    of_a_stage = -(-config.depth // config.rows_at_once) * config.row_copies
    pieces = 2 if resident else 1  # separate code loads the first stages
    copies = re.findall(r"cp\.async\.ca\.shared\.global \[%r\d+\], \[%rd\d+\], 4;", report.ptx)
    assert len(copies) == of_a_stage * pieces
    assert ("st.shared.u16" in report.ptx) == (precision == "bf16")


@pytest.mark.parametrize(
    ("name", "workload"),
    thorough([("k5_mma", "kb64"), ("k5_mma", "kb74"), ("k6_wgmma", "kb64")], always=[("k5_mma", "kb74")]),
)
def test_split_operands_are_split_once(name, workload):
    """Two numbers at a time, by their high halves; three products use them, and sums are scaled back."""
    config, report, _ = matrix_report(name, workload, "tf32x3")
    ptx, tile = report.ptx, config.tile
    window, halo = (config.window, config.halo) if name == "k5_mma" else (4 + tile.halo, tile.halo)
    packs = 4 * (window - halo + tile.reach)  # a window's: both halves of two pairs of rows
    windows = ptx.count("cvt.rn.f16x2.f32") // packs
    assert ptx.count("cvt.rn.f16x2.f32") == ptx.count("cvt.f32.f16") == windows * packs > 0
    assert ptx.count("redux.sync.max.u32") == 2 * windows, "one more for windows beside an infinity"
    assert ptx.count(MULTIPLIERS[name][0] + ".") % (3 * windows) == 0
    sums = config.fragments * RUN * 4 if name == "k5_mma" else tile.rows
    assert ptx.count("fma.rn.f32") % sums == 0 < ptx.count("fma.rn.f32")


@pytest.mark.thorough
def test_k6_loads_biases_together():
    """Single loads would each wait for the stores before."""
    _, report, _ = matrix_report("k6_wgmma", "oobleck_u4", "bf16")
    assert max(part.count("ld.shared.f32") for part in report.ptx.split("st.shared")) >= BATCH


def test_k6_lets_the_next_kernel_begin():
    _, report, _ = matrix_report("k6_wgmma", "hifigan_u1", "tf32")
    # Once for producers and once for consumers, each behind its wait for the packed weights.
    waits, lets = (report.ptx.count(f"griddepcontrol.{word}") for word in ("wait", "launch_dependents"))
    assert waits == lets == 2


@pytest.mark.thorough
@pytest.mark.parametrize("cases", ["some", "all"])
@pytest.mark.parametrize("name", MULTIPLIERS)
def test_tensor_core_rungs_compile_in_seconds(name, cases):
    """A process compiles a kernel's functions once, so only a fresh one can be timed."""
    cases = {"some": ALWAYS, "all": EVERY_MATRIX_PRODUCT}[cases]
    took = [matrix_report(rung, *case)[2] for rung, *case in cases if rung == name]
    assert statistics.mean(took) < LONGEST_COMPILATION
    assert max(took) < 1.5 * LONGEST_COMPILATION
