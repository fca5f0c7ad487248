"""k5 with resident weights on the GPU. With few multiprocessors and tiles small problems get them, too."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.k5_mma import choose as k5_choice
from numba_tconv.runtime import device
from numba_tconv.selection.registry import RUNGS
from tests.parity import LAYOUTS

from .common import able, check, tensor_arithmetic
from .sanitized import as_if_large

pytestmark = pytest.mark.gpu

K5 = RUNGS["k5_mma"]
# Reason and problem. Rows of x begin at multiples of 16 bytes.
RESIDENT = {
    "stride 1, the last tile full": Problem(1, 24, 48, 3, 2872, bias=True),
    "stride 1, one output less": Problem(1, 24, 48, 3, 2872, padding=1),
    "stride 1, one tile more": Problem(1, 24, 48, 3, 2880, bias=True),
    "rows at eight bytes": Problem(2, 48, 64, 3, 2048, bias=True),
    "rows at four bytes": Problem(2, 48, 61, 4, 2048, bias=True),
    "dilation": Problem(2, 32, 64, 5, 2048, dilation=3, padding=6),
    "tiles of rows": Problem(2, 16, 144, 3, 1024, bias=True),
    "channels that fill no stage": Problem(2, 21, 16, 3, 2048, padding=1, bias=True),
    "groups": Problem(2, 48, 72, 3, 1024, groups=3, bias=True),
    "chunks of taps": Problem(1, 8, 16, 61, 4096, padding=30),
    "samples that share tiles": Problem(400, 16, 24, 3, 24, padding=1, bias=True),
    "samples of one column": Problem(3000, 16, 24, 3, 8, bias=True),
    "a decoder's layer": Problem(3, 32, 16, 8, 1024, stride=4, padding=2, bias=True),
    "unequal taps": Problem(2, 32, 16, 7, 1024, stride=4, padding=3, output_padding=1, bias=True),
    "every other output empty": Problem(2, 32, 64, 3, 2048, stride=2, dilation=2, padding=1, bias=True),
    "two of three outputs empty": Problem(2, 32, 64, 3, 2048, stride=3, dilation=3, bias=True),
    "a first column before the signal": Problem(2, 16, 16, 4, 4288, stride=2, dilation=3, bias=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reason", RESIDENT)
@tensor_arithmetic
def test_small_problems(reason, layout, dtype, precision):
    problem = RESIDENT[reason]
    able(K5, problem, dtype, precision)
    with as_if_large():
        if layout == "contiguous" and precision != "tf32x3":
            assert k5_choice.choose(problem, precision, device.current_device()).resident_weights
        check(K5, problem, dtype, precision, layout)


@pytest.mark.parametrize("fewer", [1, 2, 4])
@pytest.mark.parametrize("reason", RESIDENT)
@tensor_arithmetic
def test_rows_that_begin_anywhere(reason, fewer, dtype, precision):
    """Rows are copied by words: at 4, 8 and 16 bytes or, in 16 bits, at 2, 4 and 8."""
    problem = replace(RESIDENT[reason], length=RESIDENT[reason].length - fewer)
    able(K5, problem, dtype, precision)
    with as_if_large():
        if precision != "tf32x3":
            assert k5_choice.choose(problem, precision, device.current_device(), aligned=False).resident_weights
        check(K5, problem, dtype, precision)


@pytest.mark.parametrize("length", [65536, 65537])
@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "tf32"), (torch.bfloat16, "bf16")])
def test_a_whole_gpu(length, dtype, precision):
    problem = Problem(8, 32, 64, 5, length, dilation=3, bias=True)
    assert k5_choice.choose(problem, precision, aligned=length % 8 == 0).resident_weights
    check(K5, problem, dtype, precision)
