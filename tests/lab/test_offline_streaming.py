"""The kernel of steps as compiled: no spill, no local memory, one coalesced load a weight."""

from dataclasses import replace

import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.streaming import plan, tile
from numba_tconv.lab.machine_code import offline
from numba_tconv.ptx import SIMULATOR
from tests.thorough import thorough

from .test_offline import AMPERE, BF16, F32, F64, HOPPER, check_memory

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")

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


@pytest.mark.parametrize("reason", thorough(CASES, always=("one slot", "many slots")))
def test_stays_in_its_registers(reason):
    (in_channels, out_channels, kernel_size, stride, groups), slots, frames, dtype, cc = CASES[reason]
    problem = Problem(slots, in_channels, out_channels, kernel_size, frames, stride, groups=groups)
    (only,) = plan.steps(problem, dtype)
    config = tile.choose(problem, dtype)
    report = offline.report(only.kernel, cc, only.shared_bytes)
    check_memory(report, 65_536 // (config.threads * config.min_blocks))
    assert report.blocks_per_multiprocessor >= min(2, config.min_blocks)  # whatever shared memory they have


def test_a_step_of_few_frames_shares_weights_between_slots():
    problem = Problem(1, *DENSE[:3], 1, DENSE[3])
    sums = [tile.choose(replace(problem, batch=batch), F32).slots for batch in (1, 2, 64)]
    assert sums == [1, 2, 8]
