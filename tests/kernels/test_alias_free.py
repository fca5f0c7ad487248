"""The alias-free activation's phases, and the longest rows and most blocks that its kernels take."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from numba_tconv.formula.alias_free import alias_free
from numba_tconv.gradients.alias_free import plan as gradient_plan
from numba_tconv.gradients.alias_free import trigonometry
from numba_tconv.kernels.alias_free import plan, tile

PI = Fraction("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")


@pytest.mark.parametrize(
    ("real", "most"), [(np.float32, trigonometry.MOST_TURNS), (np.float64, trigonometry.WIDE_MOST_TURNS)]
)
@pytest.mark.parametrize("a", [1.0, 3.0, 0.7, 1e-3])
def test_a_phase_is_exact_up_to_its_rounding(a, real, most, monkeypatch):
    """With multiply-adds that round once, as a GPU's do; the simulator's round twice."""

    def fma(a, b, c):
        return real(float(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))))

    monkeypatch.setattr(trigonometry, "cuda", SimpleNamespace(fma=fma))
    of = trigonometry.trigonometry(real is np.float64)
    constants, eps = np.zeros(4, real), np.finfo(real).eps
    of.fill.py_func(constants, a, 1.0)
    row = trigonometry.Constants(*constants, slope=None)
    for turns in (0.3, 1.4, 1000.2, most / 3, most * 0.99):
        u = real(turns / a * np.pi)
        assert u <= row.most
        t = Fraction(float(of.near.py_func(u, row)))
        error = Fraction(a) * Fraction(float(u)) / PI - t
        assert abs(t) <= Fraction(1, 2) + Fraction(float(eps))
        assert abs(error - round(error)) <= eps / 2


def test_scales_are_logarithms_unless_told():
    sizes = alias_free((1, 3, 100), 12, 12, 2, 2)
    (step,), *told = (plan.steps(sizes, torch.float32, "snake", *log_scale) for log_scale in ([], [True], [False]))
    assert [step.kernel is other.kernel for (other,) in told] == [True, False]


@pytest.mark.parametrize("kernels", ["forward", "gradients"])
def test_the_longest_rows_and_the_most_blocks(kernels):
    def reason(batch, length):
        sizes = alias_free((batch, 1, length), 12, 12, 2, 2)
        if kernels == "gradients":
            return gradient_plan.refusal(sizes)
        return plan.refusal(sizes)

    assert reason(1, plan.MOST_LENGTH) is None
    assert "rows of up to" in reason(1, plan.MOST_LENGTH + 1)
    blocks = 2 if kernels == "gradients" else 1  # of a row of one sample, at most
    assert reason(plan.MOST_BLOCKS // blocks, 1) is None
    assert ("tiles" if kernels == "gradients" else "rows") in reason(plan.MOST_BLOCKS // blocks + 1, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_row_has_no_more_blocks_than_a_grid_takes(dtype):
    sizes = alias_free((1, 1, plan.MOST_LENGTH), 32, 32, 1, 1)
    config = tile.choose(sizes, dtype, "snake", True)
    passes, blocks = tile.tiles_of(sizes, config)
    assert passes * blocks * config.outputs >= sizes.out_length
    assert blocks <= 65535
