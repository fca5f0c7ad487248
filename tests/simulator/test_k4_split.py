"""k4's split-K in the CUDA simulator."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common import split_sums
from numba_tconv.kernels.common.split_sums import split
from numba_tconv.kernels.k4_register_tile import tile as k4_config
from numba_tconv.ptx import SIMULATOR
from numba_tconv.selection.registry import RUNGS
from tests.few_blocks import few_threads
from tests.parity import operands, parameters, poisoned, scatter, verdict
from tests.thorough import thorough

pytestmark = pytest.mark.skipif(not SIMULATOR, reason="needs NUMBA_ENABLE_CUDASIM=1")

PROBLEMS = {
    "a decoder's layer": Problem(2, 12, 3, 8, 5, stride=4, padding=2, bias=True),
    "groups, without a bias": Problem(1, 12, 4, 5, 6, stride=2, groups=2),
    "unequal taps": Problem(1, 6, 2, 7, 5, stride=3, padding=1, output_padding=1, bias=True),
    "stride 1, dilation": Problem(1, 6, 2, 3, 9, dilation=2, bias=True),
}


@pytest.fixture(autouse=True)
def tiny_blocks():
    with few_threads(split_sums, 8):
        yield


@pytest.mark.parametrize("splits", thorough([2, 3], always=[3]))
@pytest.mark.parametrize("reason", PROBLEMS)
def test_split_sums(reason, splits):
    problem = PROBLEMS[reason]
    x, w, bias = operands(problem, torch.float32)
    oracle = scatter(x, w, bias, problem)
    torchs = torch.conv_transpose1d(x, w, bias, **parameters(problem))
    for config in k4_config.tiny(split(problem, splits), torch.float32):
        y = poisoned(problem, torch.float32)
        RUNGS["k4_register_tile"].run(x, w, bias, y, problem, replace(config, splits=splits))
        assert verdict(y, torchs, oracle) is None, config
