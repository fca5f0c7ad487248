"""Kernels for GPUs that nobody here has: what is compiled, and how much of the GPU it takes, without a spill."""

from types import SimpleNamespace

import pytest

from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.machine_code import offline
from numba_tconv.lab.measure import workloads
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.device import GPUS, RESERVED_SHARED
from numba_tconv.runtime.kernel import architecture, target
from numba_tconv.selection import gradient as gradients
from numba_tconv.selection.forward import select
from numba_tconv.selection.registry import RUNGS
from numba_tconv.torch_api.operators import gradient_precision

from .thorough import thorough

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")

DTYPES = {precision: dtype for dtype, known in PRECISIONS.items() for precision in known}
BY_CC = {gpu.cc: gpu for gpu in GPUS.values()}
NEWER = [(8, 9), (10, 0), (12, 0)]
# Workload, precision and compute capability: the selection's choice.
FORWARD = [
    (name, precision, cc)
    for cc in NEWER
    for name, precisions in {
        "kb64": ("tf32", "bf16", "tf32x3", "ieee"),
        "kb79": ("tf32", "bf16", "tf32x3", "ieee"),
        "hifigan_u1": ("tf32", "bf16", "tf32x3", "ieee"),
        "dac_u1": ("tf32", "bf16"),
        "head": ("tf32", "tf32x3"),
        "depthwise": ("ieee", "bf16"),
        "convtasnet": ("tf32",),
        "waveglow": ("bf16",),
        "patch": ("fp64",),
    }.items()
    for precision in precisions
]
GRADIENTS = [
    (of, precision, cc) for cc in NEWER for of in ("grad_input", "grad_weight") for precision in ("ieee", "bf16")
]


def test_ptx_is_made_for_9_0_and_machine_code_for_the_gpu():
    made = {cc: (target(cc), architecture(cc)) for cc in BY_CC}
    own = {cc: (cc, cc) for cc in ((7, 5), (8, 0), (8, 6), (8, 9))}
    hopper = {(9, 0): ((9, 0, "a"), (9, 0, "a"))}  # no other GPU runs its code
    assert made == own | hopper | {cc: ((9, 0), cc) for cc in ((10, 0), (12, 0))}


def test_blocks_are_those_that_registers_and_shared_memory_leave():
    def blocks(registers, shared=0, threads=128, cc=(9, 0, "a")):
        sizes = dict(cc=cc, threads=threads, registers=registers, shared_bytes=shared)
        return offline.Report.blocks_per_multiprocessor.func(SimpleNamespace(**sizes))

    # A warp's registers come in units of 256: 65 a thread take 2,304 a warp.
    assert [blocks(registers) for registers in (32, 64, 65, 72, 73, 128, 168, 255)] == [16, 8, 7, 7, 6, 4, 3, 2]
    assert [blocks(32, shared) for shared in (0, 13 * 1024, 75 * 1024, 76 * 1024, 227 * 1024)] == [16, 16, 3, 2, 1]
    assert [blocks(32, 49 * 1024, cc=cc) for cc in ((8, 6), (8, 9), (10, 0), (12, 0))] == [2, 2, 4, 2]
    assert [blocks(32, threads=1024, cc=cc) for cc in ((7, 5), (8, 0), (8, 6), (8, 9), (12, 0))] == [1, 2, 1, 1, 1]
    assert [blocks(8, threads=32, cc=cc) for cc in ((7, 5), (8, 0), (8, 6), (8, 9), (12, 0))] == [16, 32, 16, 24, 24]


def blocks_of(rung, config):
    """Blocks that the tile was chosen for; 1 for rungs whose ``min_blocks`` is a register budget."""
    return config.min_blocks if rung.name in ("k4_register_tile", "k5_mma", "k5_dmma") else 1


@pytest.mark.parametrize(
    "cc", thorough([cc for cc in BY_CC if cc >= (8, 0)], always=[(8, 6), (9, 0), (12, 0)], tuples=True), ids=str
)
def test_what_is_selected_fits_into_shared_memory(cc):
    """A block has 99 KB on 8.6, 8.9 and 12.0."""
    device, taken = BY_CC[cc], set()
    assert device.shared_per_block == {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(cc, 99) * 1024
    for workload in list(workloads.WORKLOADS.values())[::2]:
        for precision, dtype in DTYPES.items():
            rung = select(workload.problem, dtype, precision, device)
            if rung:
                config = rung.config_on(device, workload.problem, dtype, precision)
                needs = rung.shared_bytes(workload.problem, config) + RESERVED_SHARED
                fit = blocks_of(rung, config) * needs <= device.shared_per_multiprocessor
                assert fit, (workload.name, precision, config)
                taken.add(rung.name)
    assert {"k4_register_tile", "k5_dmma", "k6_wgmma" if cc == (9, 0) else "k5_mma", "depthwise"} <= taken


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "bf16"])
def test_tiles_that_need_more_shared_memory_are_refused(precision):
    problem, dtype, k5 = Problem(1000, 64, 2, 1, 200, stride=92, dilation=3), DTYPES[precision], RUNGS["k5_mma"]
    assert k5.refusal(problem, dtype, precision, BY_CC[(8, 0)]) is None
    for cc in ((8, 6), (8, 9), (12, 0)):
        assert "shared memory" in k5.refusal(problem, dtype, precision, BY_CC[cc])
        rung = select(problem, dtype, precision, BY_CC[cc])
        assert rung.config_on(BY_CC[cc], problem, dtype, precision) if precision == "bf16" else rung is None


def check(report, device, min_blocks):
    assert report.cc == device.cc
    assert (report.spill_bytes, report.local_bytes) == (0, 0)
    assert report.registers <= 255
    assert report.shared_bytes <= device.shared_per_block
    assert report.blocks_per_multiprocessor >= min_blocks


@pytest.mark.parametrize(
    ("name", "precision", "cc"),
    thorough(FORWARD, always=[("kb79", "ieee", (10, 0))]),
)
def test_what_is_selected_stays_in_its_registers(name, precision, cc):
    device, problem, dtype = BY_CC[cc], workloads.get(name).problem, DTYPES[precision]
    rung = select(problem, dtype, precision, device)
    config = rung.config_on(device, problem, dtype, precision)
    report = offline.report(rung.kernel(config), cc, rung.shared_bytes(problem, config))
    check(report, device, blocks_of(rung, config))


@pytest.mark.thorough
@pytest.mark.parametrize(("of", "precision", "cc"), GRADIENTS)
def test_gradients_stay_in_their_registers(of, precision, cc):
    """Except gradients that torch computes."""
    device, problem, dtype = BY_CC[cc], workloads.get("hifigan_u3").problem, DTYPES[precision]
    if not gradient_precision(of, problem, dtype, precision, device):
        pytest.skip("torch computes it")
    rung = gradients.select(of, problem, dtype, device, precision=precision)
    config = rung.config_on(device, problem, dtype, precision)
    for _, kernel, shared_bytes in rung.steps(config, problem, device):
        check(offline.report(kernel, cc, shared_bytes), device, min_blocks=1)
