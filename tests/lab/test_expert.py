"""The conv1d formulation that measurements compare with: the same function, wherever it applies."""

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import bench, expert, workloads
from numba_tconv.lab.measure.directions import torch_forward
from numba_tconv.lab.measure.workloads import Workload

FORMULATION = {
    "stride 1": Problem(2, 3, 5, 4, 11, bias=True),
    "stride 1, padding": Problem(2, 3, 5, 4, 11, padding=2),
    "stride 1, padding beyond the kernel": Problem(1, 3, 2, 3, 11, padding=4),
    "stride 1, dilation": Problem(1, 3, 2, 5, 9, dilation=3, padding=1, bias=True),
    "stride 1, output_padding": Problem(1, 3, 2, 5, 9, dilation=3, padding=1, output_padding=2),
    "stride 1, groups": Problem(2, 6, 4, 3, 7, groups=2, padding=1, bias=True),
    "K = s": Problem(1, 4, 6, 3, 8, stride=3, bias=True),
    "K = 2s": Problem(2, 4, 6, 8, 8, stride=4, padding=2, bias=True),
    "K = 3s, groups": Problem(2, 6, 9, 6, 5, stride=2, padding=3, groups=3, bias=True),
    "depthwise": Problem(2, 5, 5, 4, 9, stride=2, padding=1, groups=5),
    "output_padding within the padding": Problem(1, 3, 2, 4, 6, stride=2, padding=1, output_padding=1),
    "output_padding beyond the padding": Problem(1, 3, 2, 8, 6, stride=4, padding=1, output_padding=3, bias=True),
    "padding beyond the kernel": Problem(1, 2, 2, 4, 9, stride=2, padding=5),
    "one sample": Problem(1, 1, 1, 2, 1, stride=2),
}


@pytest.mark.parametrize("reason", FORMULATION)
def test_the_conv1d_formulation_is_the_same_function(reason):
    p = FORMULATION[reason]
    assert expert.applies(p)
    x, weight, bias = bench.make_inputs(Workload("", p, "", ""), torch.float64, "cpu")
    y = expert.run(x, expert.pack(weight, p), expert.pack_bias(bias, p), p)
    torch.testing.assert_close(y, torch_forward(x, weight, bias, p))


def test_where_the_formulation_does_not_apply():
    assert not expert.applies(Problem(1, 1, 1, 3, 8, stride=2))
    assert not expert.applies(Problem(1, 1, 1, 4, 8, stride=2, dilation=3))
    assert not expert.applies(workloads.get("kb79").problem)
