"""Traffic counted from a problem and a tile, against the machine code and against single taps."""

import re
from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.lab.explain.traffic import traffic
from numba_tconv.lab.machine_code import offline
from numba_tconv.lab.machine_code.inspection import compiled
from numba_tconv.lab.measure import workloads
from numba_tconv.runtime.device import H200
from numba_tconv.selection.registry import RUNGS
from tests.thorough import thorough

LADDER = ("k1_gather", "k2_polyphase", "k3_shared_tile", "k4_register_tile")


def loads_per_multiply_add(ptx, space):
    """Elements that the inner loop loads from ``space`` for each multiply-add."""
    inner = min(offline.product_loops(ptx), key=len)
    widths = re.findall(rf"\bld\.{space}(?:\.v(\d))?\.[fb]32", inner)
    return sum(int(width or 1) for width in widths) / inner.count("fma.rn.f32")


@pytest.mark.parametrize("workload", thorough(["kb64", "hifigan_u3"], always=["kb64"]))
def test_loads_a_multiply_add_are_those_of_the_compiled_loop(workload):
    problem = workloads.get(workload).problem
    for name in LADDER[1:]:
        config, (report,) = compiled(name, problem, torch.float32, "ieee")
        counted = traffic(name, problem, config)
        space, loads = ("shared", counted.from_shared) if counted.from_shared else ("global", counted.from_global)
        assert loads / counted.multiply_adds == pytest.approx(loads_per_multiply_add(report.ptx, space), rel=1e-3)


@pytest.mark.parametrize(("stride", "dilation", "kernel_size"), [(1, 1, 3), (2, 1, 4), (2, 2, 3), (3, 2, 7)])
def test_a_block_fetches_what_its_outputs_need_and_little_else(stride, dilation, kernel_size):
    """The definition finds the inputs; in long signals the blocks at the ends do not count."""
    p = Problem(2, 32, 64, kernel_size, 120_000, stride, dilation=dilation)
    config = RUNGS["k3_shared_tile"].config(p, torch.float32)
    first, last = 6000, 6000 + config.outputs - 1
    meets = [i for i in range(7000) for k in range(kernel_size) if first <= i * stride + k * dilation <= last]
    needed = max(meets) - min(meets) + 1 + config.channels * kernel_size
    fetched = traffic("k3_shared_tile", p, config).from_global * config.outputs * config.channels / p.in_channels
    assert needed <= fetched <= 1.01 * (needed + 2)

    config = RUNGS["k4_register_tile"].config_on(H200, p, torch.float32, "ieee")
    channels = p.out_channels * config.row_parts / config.row_tiles(p)  # of an average block
    a_block = traffic("k4_register_tile", p, config).from_global * channels * config.phases * config.block_n
    reach = config.block_n + (p.taps.taps_per_row - 1) * p.taps.step
    needed = p.in_channels * (reach + channels * kernel_size / config.row_parts)
    with_padding = p.in_channels * (reach + config.block_m * p.taps.taps_per_row)
    assert needed <= a_block * p.taps.gap <= 1.1 * with_padding


def test_partial_sums_are_loaded_again():
    problem, k4 = workloads.get("head").problem, RUNGS["k4_register_tile"]
    config = k4.config_on(H200, problem, torch.float32, "ieee")
    assert config.splits > 1
    whole = replace(config, splits=1)
    of_parts, of_whole = (traffic("k4_register_tile", problem, one) for one in (config, whole))
    assert of_parts.from_global == pytest.approx(of_whole.from_global + config.splits)
    assert of_parts.turns == of_whole.turns


@pytest.mark.parametrize("name", LADDER)
def test_turns_hold_the_multiply_adds(name):
    """Phases have equally many taps, too many for one window of k4. k1 tests every tap; the others multiply."""
    p = Problem(4, 64, 64, 32, 65536, 4, padding=14)
    counted = traffic(name, p, RUNGS[name].config_on(H200, p, torch.float32, "ieee"))
    tested = p.stride if name == "k1_gather" else 1
    assert counted.turns == pytest.approx(tested * counted.multiply_adds, rel=1e-3)
    assert counted.multiply_adds == 64 * 8


def test_other_rungs_are_refused():
    with pytest.raises(ValueError, match="k5_mma"):
        traffic("k5_mma", workloads.get("kb64").problem, None)
