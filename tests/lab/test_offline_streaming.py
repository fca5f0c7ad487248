"""The kernels of steps as compiled: no spill, no local memory, tensor cores and vectors where they are the idea."""

import re
from dataclasses import replace

import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.streaming import plan, tile
from numba_tconv.lab.machine_code import offline
from tests.thorough import thorough

from .test_offline import AMPERE, BF16, F16, F32, F64, HOPPER, check_memory

DENSE, SMALL, DEPTHWISE = (1024, 512, 16, 8, 1), (128, 64, 8, 4, 1), (512, 512, 4, 2, 512)
# Sizes, slots, new frames, dtype, compute capability.
CASES = {
    "one slot": (DENSE, 1, 1, F32, HOPPER),
    "one slot, bfloat16": (DENSE, 1, 1, BF16, HOPPER),
    "many slots": (DENSE, 64, 1, F32, HOPPER),
    "many frames, float64": (SMALL, 1, 8, F64, HOPPER),
    "one slot, float64": (DENSE, 1, 1, F64, HOPPER),
    "some slots, float64": (DENSE, 4, 1, F64, HOPPER),
    "many slots and frames": (SMALL, 64, 4, F32, HOPPER),
    "many frames, on Ampere": (DENSE, 1, 16, BF16, AMPERE),
    "depthwise": (DEPTHWISE, 1, 1, F32, HOPPER),
    "on Ampere": (DENSE, 8, 1, F32, AMPERE),
}


UPSAMPLE = 1024, 1024, 2, 2, 1  # nothing is kept
# Sizes, slots, new frames, dtype and precision.
PRODUCTS = {
    "many slots": (DENSE, 64, 1, F32, "tf32"),
    "many slots, bfloat16": (DENSE, 64, 1, BF16, "bf16"),
    "many slots, several frames": (DENSE, 64, 4, F32, "tf32"),
    "warps that share columns, bfloat16": (DENSE, 256, 1, BF16, "bf16"),
    "some slots, several frames, float16": (SMALL, 8, 3, F16, "fp16"),
    "nothing kept": (UPSAMPLE, 64, 1, BF16, "bf16"),
}


def compiled(sizes, slots, frames, dtype, precision="ieee", cc=HOPPER):
    in_channels, out_channels, kernel_size, stride, groups = sizes
    problem = Problem(slots, in_channels, out_channels, kernel_size, frames, stride, groups=groups)
    (only,) = plan.steps(problem, dtype, precision)
    report = offline.report(only.kernel, cc, only.shared_bytes)
    check_memory(report, 65_536 // (only.kernel.threads * only.kernel.min_blocks))
    assert report.blocks_per_multiprocessor >= min(2, only.kernel.min_blocks)  # whatever shared memory they have
    return report


@pytest.mark.parametrize("reason", thorough(CASES, always=("many slots",)))
def test_stays_in_its_registers(reason):
    *sizes, cc = CASES[reason]
    compiled(*sizes, cc=cc)


@pytest.mark.parametrize("reason", thorough(PRODUCTS, always=("many slots, bfloat16",)))
def test_many_columns_are_products_of_tensor_cores_with_copied_weights(reason):
    report = compiled(*PRODUCTS[reason])
    assert "mma.sync" in report.ptx
    assert re.search(r"cp\.async\.cg\.shared\.global \[%r\d+\], \[%rd\d+\], 16", report.ptx)


@pytest.mark.parametrize("frames", [1, 3])
def test_a_depthwise_step_has_no_shared_memory(frames):
    report = compiled(DEPTHWISE, 64, frames, F32)
    assert report.name == "streaming_depthwise"
    assert not report.shared_bytes
    assert report.registers <= 64


def test_a_step_of_few_frames_shares_weights_between_slots():
    problem = Problem(1, *DENSE[:3], 1, DENSE[3])
    sums = [tile.choose(replace(problem, batch=batch), F32).slots for batch in (1, 2, 64)]
    assert sums == [1, 2, 8]


DILATED = Problem(1, 32, 64, 5, 1, 1, dilation=3, bias=True)


ANY_PLACE = {
    "bfloat16": (DILATED, 31, BF16),
    "float32": (DILATED, 23, F32),
    "float64": (Problem(1, 34, 80, 11, 1, 1, groups=2, dilation=5), 2, F64),
}


@pytest.mark.parametrize("reason", thorough(ANY_PLACE, always=("float32",)))
def test_frames_at_any_place_are_loaded_one_by_one(reason):
    """A slot's frames begin at any element of shared memory, but ptxas may take their places for multiples of four."""
    layer, frames, dtype = ANY_PLACE[reason]
    (only,) = plan.steps(replace(layer, length=frames), dtype, {F64: "fp64", BF16: "bf16"}.get(dtype, "ieee"))
    assert tile.choose(replace(layer, length=frames), dtype).slots == 1
    loads = re.findall(r"\bLDS(?:\.\w+)*", offline.report(only.kernel, HOPPER, only.shared_bytes).sass)
    assert loads
    assert set(loads) <= {"LDS", "LDS.64"} if dtype == F64 else set(loads) == {"LDS"}
