"""Random problems on every rung, in every precision, against float64.

NUMBA_TCONV_FUZZ says how many. What a kernel is compiled for (stride, taps, the channels of a group) is drawn from a
list, since compiling takes seconds; all else (lengths, batch, cropping, layouts) is drawn freely.
"""

import os

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from numba_tconv.kernels import RUNGS
from numba_tconv.kernels.device import current_device
from numba_tconv.problem import Problem
from tests.gpu.common import ARITHMETIC, in_float64
from tests.parity import LAYOUTS, operands, poisoned, terms

pytestmark = pytest.mark.gpu

PROBLEMS = int(os.environ.get("NUMBA_TCONV_FUZZ", 200))
# Stride, kernel size, dilation; input and output channels of a group.
STRUCTURES = [
    *[(1, 1, 1, 16, 16), (1, 3, 1, 128, 128), (1, 5, 3, 32, 64), (1, 7, 1, 24, 130), (1, 11, 5, 17, 40)],
    *[(1, 41, 1, 9, 10), (2, 4, 1, 128, 64), (2, 3, 2, 32, 64), (2, 2, 1, 40, 72), (2, 5, 3, 20, 33)],
    *[(3, 7, 1, 37, 53), (3, 7, 5, 16, 24), (4, 8, 1, 48, 8), (4, 6, 2, 8, 16), (5, 10, 1, 64, 32)],
    *[(5, 3, 1, 10, 12), (6, 9, 4, 12, 20), (8, 16, 1, 64, 32), (8, 9, 12, 24, 40), (16, 32, 1, 16, 9)],
    *[(12, 5, 18, 8, 8), (100, 130, 1, 8, 3), (256, 512, 1, 8, 1), (2, 4, 1, 1, 1), (1, 9, 700, 16, 16)],
]  # fmt: skip


@st.composite
def problems(draw, structure):
    stride, kernel_size, dilation, in_per_group, out_per_group = structure
    # Around one tile of columns, and beyond it; few where each of them is many outputs.
    length = draw(st.integers(1, 140) | st.integers(1, max(1, 2000 // stride)))
    groups = draw(st.integers(1, 3))
    output_padding = draw(st.integers(0, max(stride, dilation) - 1))
    uncropped = (length - 1) * stride + dilation * (kernel_size - 1) + output_padding + 1
    reach = dilation * (kernel_size - 1) + stride  # of most interest is padding up to this
    return Problem(
        *(draw(st.integers(1, 5)), groups * in_per_group, groups * out_per_group, kernel_size, length),
        stride=stride,
        padding=draw(st.integers(0, min(reach, (uncropped - 1) // 2)) | st.integers(0, (uncropped - 1) // 2)),
        output_padding=output_padding,
        groups=groups,
        dilation=dilation,
        bias=draw(st.booleans()),
    )


def bound(x, w, bias, problem, dtype, precision):
    """How far each output may be from the oracle, whatever the order of its sum.

    With m, the sum of the products' magnitudes: what rounding the operands moves them by, what each addition loses (a
    tensor core cuts off what does not fit, so twice as much), and what storing the output rounds off.
    """
    magnitude = in_float64(*(None if t is None else t.abs() for t in (x, w, bias)), problem)
    operands_rounding = 2**-10 + 2**-20 if precision == "tf32" else 0
    additions = (terms(problem) + 8) * (2**-52 if dtype == torch.float64 else 2**-22)
    stored = torch.finfo(dtype)
    return magnitude * (operands_rounding + additions + stored.eps / 2) + stored.smallest_normal


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_random_problems(structure, watchdog):
    @hypothesis.settings(max_examples=max(1, PROBLEMS // len(STRUCTURES)), suppress_health_check=hypothesis.HealthCheck)
    @hypothesis.given(
        problem=problems(structure),
        arithmetic=st.sampled_from(ARITHMETIC),
        layout=st.sampled_from(sorted(LAYOUTS)),
        seed=st.integers(0, 2**31),
        data=st.data(),
    )
    def run(problem, arithmetic, layout, seed, data):
        watchdog()
        dtype, precision = arithmetic
        device = current_device()
        able = [name for name, rung in RUNGS.items() if rung.refusal(problem, dtype, precision, device) is None]
        hypothesis.assume(able)
        name = data.draw(st.sampled_from(able), label="rung")
        torch.manual_seed(seed)
        x, w, bias = operands(problem, dtype, "cuda", layout)
        y = poisoned(problem, dtype, "cuda")
        RUNGS[name].run(x, w, bias, y, problem, precision=precision)
        oracle, allowed = in_float64(x, w, bias, problem), bound(x, w, bias, problem, dtype, precision)
        right = (y.double() - oracle).abs() <= allowed  # false for NaN too
        assert right.all(), f"{name} in {precision}, {layout}, {problem}: {(~right).sum()} wrong outputs"

    run()
