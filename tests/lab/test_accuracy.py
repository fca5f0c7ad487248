"""Errors of the output and of every gradient against float64, and which results count as right."""

import math

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import accuracy, bench
from numba_tconv.lab.measure.accuracy import Error, errors, right
from numba_tconv.lab.measure.directions import Operands, by_torch
from numba_tconv.lab.measure.workloads import Workload
from numba_tconv.selection.directions import OF_GRADIENTS, RESULTS
from tests.gradient_parity import references_gradient
from tests.parity import scatter

PROBLEM = Problem(3, 4, 5, 4, 50, stride=2, padding=1, bias=True)
results = pytest.mark.parametrize("result", RESULTS)


def operands_of(problem, dtype=torch.float32):
    return bench.make_operands(Workload("", problem, "", ""), dtype, "cpu", gradients=True)


@pytest.fixture(params=RESULTS)
def measured(monkeypatch, request):
    """torch's result, and a function for the error of any other; one sample at a time is compared with float64."""
    monkeypatch.setattr(accuracy, "ORACLE_ELEMENTS", 1)
    operands = operands_of(PROBLEM)
    y = by_torch(request.param, operands, PROBLEM)
    return y, lambda values: errors({"": values}, operands, PROBLEM, request.param)[""]


def test_errors_are_relative_to_float64(measured):
    y, error = measured
    assert 0 < error(y).norm < 1e-6
    doubled = error(2 * y)
    assert doubled.norm == pytest.approx(1, rel=1e-5)
    assert doubled.largest == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("loud", range(PROBLEM.batch))
def test_the_largest_error_is_relative_to_the_loudest_sample(monkeypatch, loud):
    monkeypatch.setattr(accuracy, "ORACLE_ELEMENTS", 1)
    operands = operands_of(PROBLEM)
    operands.x[loud] *= 100
    doubled = 2 * by_torch("forward", operands, PROBLEM)
    assert errors({"": doubled}, operands, PROBLEM)[""].largest == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("where", [0, 3, -1])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.5])
def test_one_wrong_element_is_found(measured, where, value):
    y, error = measured
    wrong = y.clone()
    wrong.view(-1)[where] += value
    assert error(y).within(error(y), torch.float32, "ieee", terms=1)
    assert not error(wrong).within(error(y), torch.float32, "ieee", terms=1)


@results
@pytest.mark.parametrize("at_once", [1, 1 << 27], ids=["a sample at a time", "all at once"])
@pytest.mark.parametrize(
    "problem",
    [PROBLEM, Problem(3, 4, 6, 3, 11, stride=3, padding=2, output_padding=1, groups=2, dilation=2, bias=True)],
    ids=str,
)
def test_what_results_are_held_against_is_what_the_plain_loops_give(monkeypatch, result, at_once, problem):
    monkeypatch.setattr(accuracy, "ORACLE_ELEMENTS", at_once)
    x, weight, bias, grad_output = operands = operands_of(problem)
    if result in OF_GRADIENTS:
        expected = references_gradient(result, grad_output, x, weight, problem)
    else:
        expected = scatter(x, weight, bias, problem)
    assert expected.shape == problem.shape_of(result)
    assert errors({"": expected}, operands, problem, result)[""].norm < 1e-14


@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
def test_within_is_twice_torchs_error_and_no_more(precision):
    def within(norm, largest):
        return Error(norm, largest).within(Error(1e-6, 2e-6), torch.float32, precision, terms=8)

    assert within(2e-6, 4e-6)
    assert not within(2.1e-6, 1e-6)
    assert not within(1e-6, 4.1e-6)
    assert not within(math.nan, math.nan)


def test_tf32_is_held_against_torchs_tf32_or_where_torch_has_not_used_it_against_a_bound():
    def within(norm, largest, of_torch):
        return Error(norm, largest).within(Error(of_torch, of_torch), torch.float32, "tf32", terms=8)

    assert within(6e-4, 6e-4, of_torch=3e-4)
    assert not within(6.1e-4, 1e-4, of_torch=3e-4)
    assert within(4e-4, 6e-4, of_torch=2e-7)
    assert not within(4.1e-4, 4e-4, of_torch=2e-7)
    assert not within(3e-4, 6.1e-4, of_torch=2e-7)
    assert not within(math.nan, math.nan, of_torch=2e-7)


@results
def test_tf32_rounds_products_alone(result):
    """Where torch did not use TF32 its bound stands in, except for a sum without products."""
    of_torch, error = Error(1e-7, 1e-7), Error(3e-4, 3e-4)
    assert right(result, error, of_torch, operands_of(PROBLEM), "tf32", PROBLEM) == (result != "grad_bias")
    assert not right(result, error, of_torch, operands_of(PROBLEM), "ieee", PROBLEM)


def test_a_bias_adds_no_rounding_of_products():
    operands = operands_of(PROBLEM)
    found = []
    for one in (operands, operands._replace(bias=operands.bias + 100)):
        truth = scatter(*one[:3], PROBLEM)
        rounding = accuracy.rounding("forward", one, PROBLEM, "tf32")
        found.append((rounding.norm * truth.norm().item(), rounding.largest * truth.abs().amax().item()))
    assert found[1] == pytest.approx(found[0])


@results
def test_the_rounding_of_float64_follows_the_longest_sum(result):
    operands = operands_of(PROBLEM, torch.float64)
    edge = math.sqrt(PROBLEM.terms(result)) * torch.finfo(torch.float64).eps
    for factor in (0.99, 1.01):
        error = Error(factor * edge, factor * edge)
        assert right(result, error, Error(0.0, 0.0), operands, "fp64", PROBLEM) == (factor < 1)


def test_only_float64_is_allowed_the_rounding_of_its_sums():
    """Rounding changes sums of eight products by about sqrt(8) spacings."""
    exact = Error(0.0, 0.0)
    for dtype, spacings in ((torch.float64, math.sqrt(8)), (torch.float32, 1)):
        edge = spacings * torch.finfo(dtype).eps
        assert Error(0.99 * edge, 0.99 * edge).within(exact, dtype, "ieee", terms=8)
        assert not Error(1.01 * edge, 0.0).within(exact, dtype, "ieee", terms=8)
        assert not Error(0.0, 1.01 * edge).within(exact, dtype, "ieee", terms=8)


def test_the_longest_sums():
    """An output sums 4 channels of 2 taps. Its 5 channels have 4 taps; 3 samples have 50 positions, 100 in the
    output."""
    assert {result: PROBLEM.terms(result) for result in RESULTS} == {
        "forward": 8, "grad_input": 20, "grad_weight": 150, "grad_bias": 300
    }  # fmt: skip


def test_an_empty_batch_has_no_error():
    p = Problem(0, 2, 3, 4, 5)
    operands = Operands(*bench.make_inputs(Workload("", p, "", ""), torch.float32, "cpu"))
    assert errors({"": by_torch("forward", operands, p)}, operands, p)[""] == Error(0, 0)
