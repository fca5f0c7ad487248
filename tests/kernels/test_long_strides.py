"""Strides that 32 bits do not count: k2_polyphase computes them; what counts phases in 32 bits refuses."""

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.runtime.device import H200
from numba_tconv.selection.forward import select
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS

STRIDES = [2**30, 2**31 - 3, 2**31 + 5, 2**33]


def problem(stride):
    return Problem(1, 2, 2, 1, 1, stride=stride, groups=2)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize(
    "name", ["k3_shared_tile", "k4_register_tile", "depthwise", "grad_input_tile", "grad_weight_split"]
)
def test_phases_counted_in_32_bits(name, stride):
    rung = (RUNGS | GRADIENTS)[name]
    assert "counts phases in 32 bits" in rung.refusal(problem(stride), torch.float32, "ieee", H200)
    assert rung.refusal(problem(2**30 - 1), torch.float32, "ieee", H200) is None


def test_the_selection_takes_a_rung_that_counts_them():
    assert select(problem(2**31 + 5), torch.float32, "ieee", H200).name == "k2_polyphase"
