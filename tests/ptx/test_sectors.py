"""16-byte copies take whole sectors: where windows and weights begin, in memory and in a block."""

import re

import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.sectors import SECTOR, entries_before
from numba_tconv.kernels.k5_dmma.tile import candidates, choose
from numba_tconv.lab.machine_code import offline
from numba_tconv.lab.measure import workloads
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.device import A100, H200
from numba_tconv.selection.registry import RUNGS
from tests.lab.test_offline import tile_report
from tests.lab.test_offline_gradients import tile_report as gradient_report
from tests.thorough import thorough

PROBLEMS = [w.problem for w in workloads.WORKLOADS.values() if w.problem.in_channels_per_group >= 4]
PROBLEMS += [Problem(3, 24, 32, 11, 200, stride=5, padding=3), Problem(2, 12, 9, 4, 402, stride=4, dilation=6)]


@pytest.mark.parametrize("distance", range(0, 2 * SECTOR, 16))
def test_no_more_entries_than_it_takes(distance):
    for entries in range(1, 40):
        whole = [e for e in range(entries, entries + 4) if (8 * e + distance) % SECTOR == 0]
        assert entries_before(entries, distance) == whole[0]


@pytest.mark.parametrize("device", [H200, A100], ids=["H200", "A100"])
def test_windows_in_float64_begin_with_sectors(device):
    """For every tile and sample, in memory and in a stage."""
    for problem in PROBLEMS:
        for c in candidates(problem, 2, device):
            first, columns = c.columns(problem)
            assert 0 <= c.lead - c.halo < SECTOR // 8
            if c.x_vector == 1:
                continue  # whose chunks of taps begin between vectors
            for elements in (first - c.lead, columns, c.block_n, c.width, c.x_stage, c.w_stage):
                assert elements * c.itemsize % SECTOR == 0


def fixed_bytes(ptx):
    """Bytes of static arrays before the launch's memory, which the compiler aligns to 16."""
    return -(-sum(int(size) for size in re.findall(r"\.shared \.align 8 \.b8 \w+\[(\d+)\]", ptx)) // 16) * 16


@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(
    "reason",
    thorough(
        ["128 channels, stride 1", "the widest window", "copies of two elements", "single-element copies"],
        always=["128 channels, stride 1"],
    ),
)
def test_stages_of_k4_begin_with_sectors(reason):
    assert fixed_bytes(tile_report(reason).ptx) % SECTOR == 0


@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
def test_stages_of_k5_dmma_begin_with_sectors():
    config = choose(workloads.get("patch").problem, 2)
    report = offline.report(RUNGS["k5_dmma"].kernel(config), (9, 0, "a"), config.shared_bytes)
    assert fixed_bytes(report.ptx) % SECTOR == 0


@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(
    "reason",
    thorough(
        ["128 channels, stride 1", "rows of unequal taps", "float64"],
        always=["128 channels, stride 1", "rows of unequal taps"],
    ),
)
def test_weights_for_the_gradient_of_the_input_begin_with_sectors(reason):
    config, report = gradient_report("grad_input_tile", reason)
    assert (fixed_bytes(report.ptx) + config.g_stage * config.itemsize) % SECTOR == 0
