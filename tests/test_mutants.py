"""Tests of the suite itself: every common mistake in the index formula must fail the parity check.

A gather in plain Python, with a switch for every mistake, stands in for a kernel.
"""

import math

import pytest
import torch

from numba_tconv.kernels.rung import SUM_CHANNELS
from numba_tconv.lab.measure import check

from .parity import SMALL, Error, answers, error, far_apart, operands, verdict

MISTAKES = [
    "no divisibility test",
    "output_padding added to the index",
    "negative numerators truncated toward zero",
    "taps flipped",
    "weight indexed (out, in, k)",
    "padding subtracted twice",
    "dilation ignored in L_out",
    "flat indices in 32 bits",
    "phases without taps take those of another",
    "the sum of the last channels alone is kept",
]


def c_divmod(numerator, denominator):
    """C's division, which truncates toward zero, and its remainder, with the numerator's sign."""
    quotient = abs(numerator) // denominator * (1 if numerator >= 0 else -1)
    return quotient, numerator - quotient * denominator


def gather(x, w, bias, problem, mistake=None):
    """The definition by outputs, on flat memory; right if there is no mistake."""
    p = problem
    gap = math.gcd(p.stride, p.dilation) if mistake == "phases without taps take those of another" else 1
    forgets = mistake == "the sum of the last channels alone is kept"
    truncates = mistake in ("no divisibility test", "negative numerators truncated toward zero")
    divide = c_divmod if truncates else divmod
    offset = p.padding * (2 if mistake == "padding subtracted twice" else 1)
    offset += p.output_padding if mistake == "output_padding added to the index" else 0
    out_length = p.out_length
    if mistake == "dilation ignored in L_out":
        out_length -= (p.dilation - 1) * (p.kernel_size - 1)

    memory = x.as_strided((1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)),), (1,)).numpy()
    weights = w.flatten().tolist()
    y = torch.full((p.batch, p.out_channels, max(out_length, 0)), math.nan, dtype=torch.float64)
    for n, co, o in torch.cartesian_prod(*map(torch.arange, y.shape)).tolist():
        group, c = divmod(co, p.out_channels_per_group)
        total = constant = 0.0 if bias is None else bias[co].item()
        for ci in range(group * p.in_channels_per_group, (group + 1) * p.in_channels_per_group):
            if forgets and ci % p.in_channels_per_group % SUM_CHANNELS == 0:
                total = constant
            for k in range(p.kernel_size):
                i, remainder = divide(o + offset - k * p.dilation, p.stride)
                if remainder >= gap and mistake != "no divisibility test":
                    continue
                if not 0 <= i < p.length:
                    continue
                place = n * x.stride(0) + ci * x.stride(1) + i * x.stride(2)
                if mistake == "flat indices in 32 bits":
                    place = (place + 2**31) % 2**32 - 2**31
                tap = p.kernel_size - 1 - k if mistake == "taps flipped" else k
                row = ci * p.out_channels_per_group + c
                if mistake == "weight indexed (out, in, k)":
                    row = c * p.in_channels + ci
                total += float(memory[place]) * weights[row * p.kernel_size + tap]
        y[n, co, o] = total
    return y.to(x.dtype)


def cases_of(problems):
    return [(reason, problem, torch.float32, lambda x: x) for reason, problem in problems.items()]


# 16-bit indices, for half the address space.
LARGE = ("samples far apart in memory", SMALL["stride 1"], torch.float16, far_apart)
# The problems of the tests, and those of `check --small` and `demo`, without the large one.
SETS = {"tests": [*cases_of(SMALL), LARGE], "check": cases_of({str(p): p for p in check.SMALL})}


def caught_by(mistake, cases):
    """The rows whose verdict on the gather with this mistake is bad."""
    caught = []
    for reason, problem, dtype, place in cases:
        x, w, bias = operands(problem, dtype)
        if verdict(gather(place(x), w, bias, problem, mistake), *answers(x, w, bias, problem)):
            caught.append(reason)
    return caught


@pytest.mark.parametrize("of", SETS)
def test_without_a_mistake_every_row_passes(of):
    assert caught_by(None, SETS[of]) == []


@pytest.mark.parametrize(
    ("mistake", "of"),
    [(m, of) for of in SETS for m in MISTAKES if (m, of) != ("flat indices in 32 bits", "check")],
)
def test_a_mistake_is_caught(mistake, of):
    assert caught_by(mistake, SETS[of])


def test_the_verdict_sees_what_a_norm_hides():
    oracle = torch.randn(1, 4, 100_000, dtype=torch.float64)
    torchs = oracle.float()
    assert verdict(oracle.float(), torchs, oracle) is None
    one_wrong = torchs.clone()
    one_wrong[0, 2, 77] += 4 * torch.finfo(torch.float32).eps * oracle.abs().max()
    assert error(one_wrong, oracle).norm < 2 * torch.finfo(torch.float32).eps
    assert "largest error" in verdict(one_wrong, torchs, oracle)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_verdict_sees_one_element_that_was_not_written(value):
    oracle = torch.randn(1, 2, 50, dtype=torch.float64)
    hole = oracle.float()
    hole[0, 1, 49] = value
    assert verdict(hole, oracle.float(), oracle) is not None


def test_the_verdict_sees_noise_above_twice_torchs():
    oracle = torch.randn(1, 4, 10_000, dtype=torch.float64)
    noise = torch.randn(oracle.shape, dtype=torch.float64)
    torchs = (oracle + 1e-4 * noise).float()
    assert verdict((oracle + 1.9e-4 * noise).float(), torchs, oracle) is None
    assert "norm error" in verdict((oracle + 2.1e-4 * noise).float(), torchs, oracle)


def test_the_verdict_on_few_values_is_that_on_an_element():
    """Their errors do not average out."""
    two, eps = torch.tensor([1.0, 3.0], dtype=torch.float64).repeat(24), torch.finfo(torch.float32).eps
    assert verdict((two * (1 + 1.9 * eps)).float(), two.float(), two) is None
    assert "norm error" in verdict((two * (1 + 2.6 * eps)).float(), two.float(), two)
    many = torch.linspace(1, 3, 48, dtype=torch.float64)
    assert "norm error" in verdict((many * (1 + 1.9 * eps)).float(), many.float(), many)


def test_the_verdict_sees_a_wrong_shape():
    oracle = torch.randn(1, 2, 50, dtype=torch.float64)
    assert error(oracle[..., :49], oracle) == Error(math.inf, math.inf)
    assert verdict(oracle[..., :49].float(), oracle.float(), oracle) is not None


def test_an_output_of_zeros_is_caught_where_the_oracle_is_zero_too():
    zeros = torch.zeros(1, 1, 4, dtype=torch.float64)
    assert verdict(zeros.float(), zeros.float(), zeros) is None
    assert verdict(zeros.float() + 1e-30, zeros.float(), zeros) is not None
