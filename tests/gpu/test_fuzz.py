"""NUMBA_TCONV_FUZZ random problems on every rung, in every precision, against float64.

Stride, taps and channels of a group come from a list, for compiled kernels; the rest is drawn freely.
"""

import os

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure.fuzz import STRUCTURES, bound
from numba_tconv.runtime.device import current_device
from numba_tconv.selection.registry import RUNGS
from tests.parity import LAYOUTS, computed, operands

from .common import ARITHMETIC, in_float64

pytestmark = pytest.mark.gpu

PROBLEMS = int(os.environ.get("NUMBA_TCONV_FUZZ", 200))


@st.composite
def problems(draw, structure):
    stride, kernel_size, dilation, in_per_group, out_per_group = structure
    # Around one tile of columns, and beyond; few where a column is many outputs.
    length = draw(st.integers(1, 140) | st.integers(1, max(1, 2000 // stride)))
    groups = draw(st.integers(1, 3))
    output_padding = draw(st.integers(0, max(stride, dilation) - 1))
    uncropped = (length - 1) * stride + dilation * (kernel_size - 1) + output_padding + 1
    reach = dilation * (kernel_size - 1) + stride  # padding up to this meets most edge cases
    return Problem(
        *(draw(st.integers(1, 5)), groups * in_per_group, groups * out_per_group, kernel_size, length),
        stride=stride,
        padding=draw(st.integers(0, min(reach, (uncropped - 1) // 2)) | st.integers(0, (uncropped - 1) // 2)),
        output_padding=output_padding,
        groups=groups,
        dilation=dilation,
        bias=draw(st.booleans()),
    )


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
        y = computed(RUNGS[name], x, w, bias, problem, precision=precision)
        oracle = in_float64(x, w, bias, problem)
        allowed = bound("forward", (x, w, bias), problem, dtype, precision)
        right = (y.double() - oracle).abs() <= allowed  # false for NaN
        assert right.all(), f"{name} in {precision}, {layout}, {problem}: {(~right).sum()} wrong outputs"

    run()
