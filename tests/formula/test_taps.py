"""Both readings of the index formula, phases and rows, in plain loops against the scatter reference."""

import numpy as np
import pytest
import torch
from hypothesis import example, given

from numba_tconv.formula.problem import Problem
from tests.parity import operands, scatter
from tests.strategies import problems

# One channel: the formula concerns positions only.
single = problems(max_groups=1).filter(lambda p: p.in_channels == p.out_channels == 1)
cases = given(single)
coprime = example(Problem(2, 1, 1, 7, 5, stride=4, dilation=9, output_padding=8, padding=3, bias=True))
common = example(Problem(2, 1, 1, 7, 5, stride=6, dilation=4, output_padding=5, padding=11, bias=True))


def one_channel(problem):
    """Input (N, L), weight (K,), bias and the expected output (N, L_out), as numpy arrays."""
    x, w, bias = operands(problem, torch.float64)
    expected = scatter(x, w, bias, problem)[:, 0].numpy()
    return x[:, 0].numpy(), w[0, 0].numpy(), 0.0 if bias is None else bias.item(), expected


@cases
@coprime
@common
def test_phases(problem):
    x, w, bias, expected = one_channel(problem)
    taps = problem.taps
    y = np.full_like(expected, bias)
    for o in range(problem.out_length):
        block, phase = divmod(o + problem.padding, problem.stride)
        for k in taps.of_phase(phase):
            i = block - taps.shift(k)
            if 0 <= i < problem.length:
                y[:, o] += x[:, i] * w[k]
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-13 * problem.kernel_size)


@cases
@coprime
@common
def test_every_tap_belongs_to_its_one_phase_and_its_one_row(problem):
    taps = problem.taps
    by_phase = [(k, phase) for phase in range(problem.stride) for k in taps.of_phase(phase)]
    assert sorted(by_phase) == [(k, taps.phase(k)) for k in range(problem.kernel_size)]
    by_row = [k for a in range(taps.rows) for k in taps.of_row(a)]
    assert sorted(by_row) == list(range(problem.kernel_size))
    assert max(len(taps.of_row(a)) for a in range(taps.rows)) == taps.taps_per_row


@cases
@coprime
@common
def test_rows_of_samples_laid_end_to_end(problem):
    """Row-wise kernels walk all samples' columns in one line; windows may reach over seams."""
    x, w, bias, expected = one_channel(problem)
    p, taps = problem, problem.taps
    columns = taps.columns(p.length, p.out_length, p.padding)
    assert columns.stop >= p.length + (taps.taps_per_row - 1) * taps.step
    line = np.array([sample[i] if 0 <= i < p.length else 0.0 for sample in x for i in columns])

    y = np.full_like(expected, np.nan)
    written = np.zeros(expected.shape, dtype=int)
    for place in range(len(line)):
        n, column = divmod(place, len(columns))
        for a in range(taps.rows):
            reached = (place - b * taps.step for b in range(len(taps.of_row(a))))
            value = sum(line[r] * w[k] for r, k in zip(reached, taps.of_row(a), strict=True) if r >= 0)
            for gap in range(taps.gap):
                o = columns[column] * p.stride + a * p.dilation + gap - p.padding
                if 0 <= o < p.out_length:
                    y[n, o] = bias + (value if gap == 0 else 0.0)
                    written[n, o] += 1
    assert (written == 1).all()
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-13 * p.kernel_size)


@pytest.mark.parametrize(
    ("stride", "dilation", "gap", "rows", "step"), [(1, 1, 1, 1, 1), (6, 4, 2, 3, 2), (2, 6, 2, 1, 3), (5, 3, 1, 5, 3)]
)
def test_gap_rows_and_step(stride, dilation, gap, rows, step):
    taps = Problem(1, 1, 1, 4, 4, stride=stride, dilation=dilation).taps
    assert (taps.gap, taps.rows, taps.step) == (gap, rows, step)
