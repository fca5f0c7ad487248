"""The depthwise kernels in 16 bits, in the CUDA simulator: what they read in vectors, wherever rows begin.

The forward pass in registers, and gradients whose runs of grad_output begin alike, for each stride.
"""

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.depthwise import direct as depthwise_direct
from numba_tconv.kernels.depthwise.rows import MOST_TAPS
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS
from tests.gradient_parity import computed_gradient, gradient_answers, gradient_operands
from tests.parity import check_nan, check_places, shifted, verdict
from tests.thorough import thorough

# Purpose of each row. Rows of several stretches; of odd lengths, so that each begins elsewhere.
PROBLEMS = {
    "stride 1": Problem(2, 3, 3, 5, 83, 1, padding=2, groups=3, bias=True),
    "stride 1, the most taps": Problem(1, 2, 2, 8, 75, 1, groups=2),
    "stride 2, six taps a phase": Problem(2, 3, 3, 12, 91, 2, padding=3, groups=3),
    "stride 2, outputs beyond the input": Problem(1, 3, 3, 4, 67, 2, output_padding=1, groups=3, bias=True),
    "stride 2, cropped where inputs go on": Problem(1, 3, 3, 4, 67, 2, padding=21, groups=3),
    "stride 2, two outputs a channel": Problem(1, 2, 4, 4, 61, 2, padding=1, groups=2, bias=True),
    "stride 4": Problem(1, 3, 3, 8, 43, 4, padding=3, output_padding=2, groups=3, bias=True),
    "stride 8": Problem(1, 3, 3, 16, 21, 8, padding=5, groups=3),
    "stride 16, vectors within a column and across two": Problem(2, 3, 3, 32, 13, 16, padding=5, groups=3, bias=True),
    "stride 32": Problem(1, 3, 3, 64, 9, 32, padding=3, groups=3),
    "fewer outputs than a vector": Problem(3, 2, 2, 4, 3, 2, padding=2, groups=2, bias=True),
}
problems = pytest.mark.parametrize("reason", PROBLEMS)
FEW = ["stride 2, six taps a phase", "stride 16, vectors within a column and across two"]


def check_forward(problem, dtype, places, layout="contiguous"):
    configs = depthwise_direct.tiny(problem, dtype)
    assert {config.runs for config in configs} == {1, 2}
    check_places(RUNGS["depthwise"], problem, dtype, configs, places, layout)


@problems
def test_forward(reason):
    check_forward(PROBLEMS[reason], torch.bfloat16, [(0, 0), (3, 6)])


@pytest.mark.parametrize("reason", FEW)
def test_forward_in_float16(reason):
    check_forward(PROBLEMS[reason], torch.float16, [(0, 0)])


@pytest.mark.parametrize("reason", thorough(FEW, always=FEW[1:]))
def test_forward_wherever_rows_begin(reason):
    check_forward(PROBLEMS[reason], torch.bfloat16, [(place, (3 * place + 1) % 8) for place in range(1, 8)])


@pytest.mark.parametrize("layout", ["transposed", "every_second", "expanded"])
def test_forward_however_elements_lie(layout):
    check_forward(PROBLEMS[FEW[0]], torch.bfloat16, [(0, 0)], layout)


def test_what_is_not_a_tap_s_input_is_not_multiplied():
    problem, dtype = PROBLEMS[FEW[0]], torch.bfloat16
    for place in range(1, problem.length, 30):
        check_nan(RUNGS["depthwise"], problem, dtype, depthwise_direct.tiny(problem, dtype), (1, 1, place))


@pytest.mark.parametrize("reason", [reason for reason, p in PROBLEMS.items() if p.kernel_size <= MOST_TAPS])
@pytest.mark.parametrize("name", ["grad_input_depthwise", "grad_weight_depthwise"])
def test_gradients(name, reason):
    problem, dtype, rung = PROBLEMS[reason], torch.bfloat16, GRADIENTS[name]
    g, x, w = gradient_operands(problem, dtype)
    right = gradient_answers(rung.of, g, x, w, problem)
    for config in rung.tiny_configs(problem, dtype):
        assert config.from_memory
        for g_place, x_place in ((0, 0), (3, 5)):
            result = computed_gradient(rung, shifted(g, g_place), shifted(x, x_place), w, problem, config)
            assert verdict(result, *right) is None, (config, g_place)
