"""The depthwise form for long filters: blocks within a row and at its ends, wherever rows begin."""

import itertools

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.depthwise import long_tile as depthwise_long_config
from numba_tconv.selection.registry import RUNGS
from tests.parity import DTYPES, check_nan, check_places
from tests.thorough import thorough

# Purpose of each row. Rows of several blocks, some within the signal.
PROBLEMS = {
    "synthesis of bands": Problem(2, 4, 1, 32, 84, 4, padding=15),
    "rows of odd lengths, one channel": Problem(2, 2, 2, 19, 83, 2, padding=5, groups=2, bias=True),
    "rows of odd lengths, several channels": Problem(2, 6, 4, 13, 71, 2, padding=3, groups=2, bias=True),
    "stride 1": Problem(1, 2, 1, 21, 120, 1, padding=10, bias=True),
    "stride 3, outputs beyond the input": Problem(1, 3, 2, 25, 59, 3, output_padding=2, bias=True),
    "dilation": Problem(1, 3, 1, 11, 76, 2, padding=4, dilation=3),
    "phases without taps": Problem(1, 2, 3, 9, 52, 4, dilation=6, padding=3, bias=True),
    "eight channels, sums in parts": Problem(1, 8, 2, 15, 52, 2, padding=3),
    "cropped where inputs go on": Problem(1, 2, 2, 16, 92, 4, padding=101),
}
FEW = ["synthesis of bands", "rows of odd lengths, several channels"]


def check(problem, dtype, places, layout="contiguous"):
    configs = depthwise_long_config.tiny(problem, dtype)
    assert {config.apart for config in configs} == {False, True}
    check_places(RUNGS["depthwise"], problem, dtype, configs, places, layout)


def test_parts_of_sums_are_of_chunks_and_of_channels():
    configs = [config for problem in PROBLEMS.values() for config in depthwise_long_config.tiny(problem, torch.float32)]
    assert {(config.apart, config.by_channel) for config in configs} == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize(
    ("reason", "dtype"),
    thorough(
        itertools.product(PROBLEMS, DTYPES),
        always=[*itertools.product(PROBLEMS, [torch.float32]), *itertools.product([*PROBLEMS][::3], [torch.bfloat16])],
    ),
    ids=str,
)
def test_every_dtype(reason, dtype):
    check(PROBLEMS[reason], dtype, [(0, 0), (3, 6)])


@pytest.mark.parametrize("reason", thorough(FEW, always=FEW[1:]))
def test_wherever_rows_begin(reason):
    check(PROBLEMS[reason], torch.float32, [(place, (3 * place + 1) % 4) for place in range(1, 4)])
    check(PROBLEMS[reason], torch.bfloat16, [(place, (3 * place + 1) % 8) for place in range(1, 8)])


@pytest.mark.parametrize("dtype", thorough([torch.float32, torch.float16], always=[torch.float16]), ids=str)
@pytest.mark.parametrize("layout", ["transposed", "every_second", "expanded"])
def test_however_elements_lie(layout, dtype):
    check(PROBLEMS[FEW[1]], dtype, [(0, 0)], layout)


@pytest.mark.parametrize("dtype", thorough([torch.float32, torch.bfloat16], always=[torch.float32]), ids=str)
@pytest.mark.parametrize("reason", ["rows of odd lengths, several channels", "phases without taps"])
def test_what_is_not_a_tap_s_input_is_not_multiplied(reason, dtype):
    problem = PROBLEMS[reason]
    for place in range(1, problem.length, 13):
        check_nan(RUNGS["depthwise"], problem, dtype, depthwise_long_config.tiny(problem, dtype), (-1, 1, place))
