"""Hypothesis strategies for problems: the whole argument space, on sizes for plain loops.

At least one output sample remains: torch's backends differ on outputs without any.
"""

from hypothesis import strategies as st

from numba_tconv.formula.problem import Problem


@st.composite
def problems(draw, max_groups=3):
    stride, dilation, kernel_size = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 7))
    length = draw(st.integers(1, 6))
    output_padding = draw(st.integers(0, max(stride, dilation) - 1))
    groups = draw(st.integers(1, max_groups))
    uncropped = (length - 1) * stride + dilation * (kernel_size - 1) + output_padding + 1
    return Problem(
        batch=draw(st.integers(1, 2)),
        in_channels=groups * draw(st.integers(1, 2)),
        out_channels=groups * draw(st.integers(1, 2)),
        kernel_size=kernel_size,
        length=length,
        stride=stride,
        padding=draw(st.integers(0, (uncropped - 1) // 2)),
        output_padding=output_padding,
        groups=groups,
        dilation=dilation,
        bias=draw(st.booleans()),
    )
