"""Which layers take the depthwise rung's form in registers, and how their rows are laid over blocks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.formula.taps import Taps
from numba_tconv.kernels.depthwise import direct as depthwise_direct
from numba_tconv.kernels.depthwise import rows as depthwise_rows
from numba_tconv.kernels.depthwise import tile as depthwise_config
from numba_tconv.kernels.depthwise.direct import DirectConfig
from numba_tconv.lab.measure import workloads
from numba_tconv.runtime.device import H200
from numba_tconv.selection.gradient import GRADIENTS, select
from numba_tconv.selection.registry import RUNGS

LAYER = Problem(16, 512, 512, 8, 4096, 4, 2, groups=512)
HALF = torch.bfloat16


@pytest.mark.parametrize("name", ["bigvgan_24", "bigvgan_768", "mimi", "pocket_tts", "depthwise"])
def test_the_decoders_layers_are_computed_in_registers_in_16_bits(name):
    problem = workloads.get(name).problem
    for dtype in (torch.bfloat16, torch.float16):
        assert isinstance(RUNGS["depthwise"].config(problem, dtype), DirectConfig)
    for dtype in (torch.float32, torch.float64):
        assert isinstance(RUNGS["depthwise"].config(problem, dtype), depthwise_config.Config)


OTHERS = {
    "two inputs a group": replace(LAYER, groups=256),
    "a tap more in some phases": replace(LAYER, kernel_size=9),
    "dilation": replace(LAYER, dilation=3),
    "phases that do not repeat": replace(LAYER, kernel_size=12, stride=6),
    "phases that do not repeat, a vector in a column": replace(LAYER, kernel_size=24, stride=24),
    "more weights than its registers": replace(LAYER, kernel_size=20),
    "more taps than its code": replace(LAYER, kernel_size=9, stride=1),
    "rows beyond 32 bits": replace(LAYER, batch=1, length=2**28),
    "rows beyond 32 bits before they are cropped": replace(LAYER, batch=1, length=2**28, padding=2**29 - 2**14),
}


@pytest.mark.parametrize("why", OTHERS)
def test_the_rest_is_not(why):
    assert isinstance(RUNGS["depthwise"].config(LAYER, HALF), DirectConfig)
    assert isinstance(RUNGS["depthwise"].config(OTHERS[why], HALF), depthwise_config.Config)


def test_the_selection_takes_all_of_them():
    """It asks whether the other form keeps its weights in registers (selection/forward.py)."""
    for stride in range(1, 130):
        for each in range(1, 10):
            problem = replace(LAYER, kernel_size=each * stride, stride=stride)
            if depthwise_direct.choose(problem, HALF):
                assert depthwise_config.choose(problem, HALF).keeps_weights
                assert RUNGS["depthwise"].supports(problem, HALF, "bf16") is None


def test_short_rows_share_a_block():
    lanes = [depthwise_direct.choose(replace(LAYER, length=n), HALF).lanes for n in (2, 100, 200, 400)]
    assert lanes == sorted(lanes)
    assert lanes[0] < 64 < lanes[-1]


@pytest.mark.parametrize("vectors", [1, 7, 128, 129, 5000, 10**6])
@pytest.mark.parametrize("rows", [1, 24, 8192])
def test_stretches_cover_a_row_evenly(rows, vectors):
    config = SimpleNamespace(lanes=64, threads=128, passes=8)
    passes, stretches = depthwise_rows.split(rows, vectors, config)
    assert 1 <= passes <= config.passes
    assert (stretches - 1) * passes * config.lanes < vectors <= stretches * passes * config.lanes
    if passes > 1:  # no longer than leaves blocks for a large GPU
        assert rows * vectors >= passes * config.threads * depthwise_rows.ENOUGH_BLOCKS


def test_the_gradients_refuse_what_they_count_in_32_bits():
    for name in ("grad_input_depthwise", "grad_weight_depthwise"):
        long = replace(LAYER, batch=1, length=2**28)
        assert "rows of up to" in GRADIENTS[name].supports(long, HALF, "bf16")
        assert GRADIENTS[name].supports(replace(long, length=2**28 - 64), HALF, "bf16") is None


def test_every_case_multiplies_what_the_definition_does():
    """Output u reads x[u div stride - b] by the tap u mod stride + b * stride."""
    for stride, each in ((1, 5), (2, 6), (4, 2), (8, 2), (16, 2), (32, 1)):
        config = DirectConfig(HALF, Taps(stride * each, stride, 1), 1)
        ways = list(range(max(0, stride - 8), stride))
        assert len(config.cases) == len(ways) * config.granule == 8
        for number, case in enumerate(config.cases):
            phase, lead = ways[number // config.granule], number % config.granule
            # As the kernel lays them out: family f has the taps of phase (phase + f) mod stride.
            products = {
                (z, (phase + weight // each) % stride + weight % each * stride, place - lead - (each - 1))
                for z, weight, place in case
            }
            expected = {
                (z, (phase + z) % stride + b * stride, (phase + z) // stride - b) for z in range(8) for b in range(each)
            }
            assert products == expected
            assert 0 <= min(place for *_, place in case) <= max(place for *_, place in case)
            assert max(place for *_, place in case) < config.granules * config.granule


def test_more_weights_in_the_gradients_are_fetched_less_often():
    """And where a sum a tap leaves registers, blocks are larger."""
    mimi, long = (workloads.get(name).problem for name in ("mimi", "pocket_tts"))
    configs = [GRADIENTS["grad_input_depthwise"].config(p, HALF) for p in (mimi, long)]
    assert configs[0].passes < configs[1].passes
    configs = [GRADIENTS["grad_weight_depthwise"].config(p, HALF) for p in (mimi, long)]
    assert configs[0].threads > configs[1].threads
    assert all(config.passes * config.positions <= 128 for config in configs)


def test_a_gradient_is_not_for_rows_that_would_be_read_often():
    for of in ("grad_input", "grad_weight"):
        for dtype in (torch.float32, HALF):
            meant = [select(of, replace(LAYER, groups=g), dtype, H200).name for g in (512, 256, 128)]
            assert [name == f"{of}_depthwise" for name in meant] == [True, True, False]
        assert select(of, replace(LAYER, groups=128), torch.float32, H200, f"{of}_depthwise").name == f"{of}_depthwise"


def test_gradients_multiply_from_memory_where_neighbours_begin_alike():
    """A warp's threads would take the code of several places otherwise."""
    apart = replace(LAYER, kernel_size=10, stride=1, dilation=4)
    for name in ("grad_input_depthwise", "grad_weight_depthwise"):
        assert GRADIENTS[name].config(LAYER, HALF).from_memory
        config = GRADIENTS[name].config(apart, HALF)
        assert config.positions < config.vector
        assert not config.from_memory
