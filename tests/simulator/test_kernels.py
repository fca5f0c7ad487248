"""Every rung in the CUDA simulator, in tiny tiles with seams and tails, against the scatter reference."""

import math

import pytest
import torch

from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.formula.problem import Problem
from numba_tconv.selection.registry import RUNGS
from tests.parity import (
    CROPPED,
    DTYPES,
    LAYOUTS,
    SMALL,
    check_configs,
    computed,
    far_apart,
    operands,
    scatter,
)
from tests.thorough import thorough

rungs = pytest.mark.parametrize("rung", RUNGS.values(), ids=RUNGS)

# Independent of the index formula: strided, grouped, with empty phases, and with several tiles.
FEW = [
    "K = 2s, the usual decoder layer",
    "groups, unequal channels",
    "gcd(stride, dilation) = 2, three rows",
    "positions past one tile",
]


def able(rung, problem, dtype):
    if reason := rung.supports(problem, dtype, PRECISIONS[dtype][0]):
        pytest.skip(f"{rung.name}: {reason}")


def check(rung, problem, dtype, layout="contiguous", place=lambda x: x):
    """Every tiny configuration of the rung computes the problem; ``place`` moves the input."""
    able(rung, problem, dtype)
    check_configs(rung, problem, dtype, rung.tiny_configs(problem, dtype), layout, place)


@rungs
@pytest.mark.parametrize("reason", thorough(SMALL, always=[*[*SMALL][::4], "stride 1"]))
def test_small_problems(rung, reason):
    check(rung, SMALL[reason], torch.float32)


@rungs
@pytest.mark.parametrize("dtype", thorough([torch.float32, torch.float16], always=[torch.float32]), ids=str)
@pytest.mark.parametrize("reason", thorough(CROPPED, always=[*CROPPED][::2]))
def test_each_end_is_cropped_by_its_own_number(rung, dtype, reason):
    check(rung, CROPPED[reason], dtype)


@rungs
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
@pytest.mark.parametrize("reason", thorough(FEW, always=FEW[2:]))
def test_dtypes(rung, dtype, reason):
    check(rung, SMALL[reason], dtype)


@rungs
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
@pytest.mark.parametrize("reason", thorough(FEW, always=FEW[1:2]))
def test_layouts(rung, layout, reason):
    check(rung, SMALL[reason], torch.float32, layout)


@rungs
def test_samples_far_apart(rung):
    check(rung, SMALL["output_padding and padding"], torch.float32, place=far_apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_stretches_of_a_row_than_an_axis_of_the_grid_has(monkeypatch, dtype):
    monkeypatch.setattr("numba_tconv.kernels.common.arguments.GRID_AXIS", 3)
    check(RUNGS["depthwise"], Problem(1, 2, 2, 4, 130, stride=2, padding=1, groups=2), dtype)


@rungs
@pytest.mark.parametrize("reason", thorough([*FEW, "positions past one tile, strided"], always=FEW[1:3]))
def test_a_weight_that_is_nan_reaches_its_outputs_and_at_most_the_ends(rung, reason):
    """Rungs other than k1 and k2 multiply the zeros around the signal."""
    problem = SMALL[reason]
    able(rung, problem, torch.float32)
    x, w, bias = operands(problem, torch.float32)
    w[0, 0, 0] = w[-1, -1, -1] = math.nan
    reached = scatter(x, w, bias, problem).isnan()
    end = 0 if rung.name in ("k1_gather", "k2_polyphase") else problem.dilation * (problem.kernel_size - 1)
    end += problem.stride + problem.output_padding if end else 0
    for config in rung.tiny_configs(problem, torch.float32):
        nan = computed(rung, x, w, bias, problem, config).isnan()
        assert nan[reached].all(), config
        inside = slice(end, max(end, problem.out_length - end))
        assert torch.equal(nan[..., inside], reached[..., inside]), config


@rungs
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("reason", thorough([*FEW, "dilation below stride, coprime"], always=FEW[2:]))
def test_nan_and_infinity_go_where_the_definition_sends_them(rung, value, reason):
    problem = SMALL[reason]
    able(rung, problem, torch.float32)
    x, w, bias = operands(problem, torch.float32)
    x[0, 0, 0] = x[-1, -1, problem.length // 2] = x[0, 1, -1] = value
    oracle = scatter(x, w, bias, problem)
    for config in rung.tiny_configs(problem, torch.float32):
        y = computed(rung, x, w, bias, problem, config)
        for which in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(which(y), which(oracle)), config
