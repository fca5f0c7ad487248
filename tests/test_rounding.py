"""The error that rounding may cost: correctly rounded operands are right even where few products nearly cancel, and
anything worse is wrong.

torch is taken to have computed more exactly than asked, as it does where it makes no use of TF32.
"""

import functools

import numpy as np
import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import accuracy, bench
from numba_tconv.lab.measure.accuracy import Error, errors, right
from numba_tconv.lab.measure.directions import Operands, by_torch
from numba_tconv.lab.measure.workloads import Workload
from numba_tconv.selection.directions import FORWARD

from .parity import SMALL, verdict
from .thorough import thorough

PRODUCTS = (FORWARD, "grad_input", "grad_weight")
EXACT = Error(1e-9, 1e-9)
ORDINARY = [Problem(8, 64, 32, 4, 100, stride=2), Problem(3, 40, 24, 10, 33, stride=5), Problem(1, 8, 8, 3, 30)]
of_each = pytest.mark.parametrize("result", PRODUCTS)
ordinary = pytest.mark.parametrize("problem", ORDINARY, ids=str)


def operands_of(problem, seed=0):
    torch.manual_seed(seed)
    inputs = bench.make_inputs(Workload("", problem, "", ""), torch.float32, "cpu", seed)
    return Operands(*inputs, torch.randn(problem.out_shape))._replace(bias=None)


def first_11_bits(tensor, half=0):
    """The first 11 bits of each number, after adding ``half`` of the last bit."""
    return ((tensor.float().view(torch.int32) + half) & ~0x1FFF).view(torch.float32)


def to_tf32(tensor):
    return first_11_bits(tensor, 0x1000)


def low(tensor):
    return to_tf32(tensor - to_tf32(tensor))


def in_tf32(result, operands, problem, *changes):
    """The float64 result of changed operands, summed over ``changes``: pairs of functions for a product's operands.
    Without any, both are rounded."""
    total = 0
    for first, second in changes or [(to_tf32, to_tf32)]:
        x, weight, _, g = operands
        # A product has two of the three as operands, each under one of the changes.
        other = second if result == FORWARD else first
        changed = Operands(first(x).double(), other(weight).double(), None, second(g).double())
        total = total + by_torch(result, changed, problem)
    return total


def is_right(values, result, operands, precision, problem):
    error = errors({"": values}, operands, problem, result)[""]
    return right(result, error, EXACT, operands, precision, problem)


@of_each
@pytest.mark.parametrize("reason", SMALL)
@pytest.mark.parametrize("seed", thorough(range(5), always=[0]))
def test_rounded_operands_are_right(result, reason, seed):
    problem = SMALL[reason]
    operands = operands_of(problem, seed)
    values = in_tf32(result, operands, problem)
    assert is_right(values, result, operands, "tf32", problem)
    oracle = by_torch(result, Operands(*(t if t is None else t.double() for t in operands)), problem)
    limits = functools.partial(accuracy.rounding, result, operands, problem, "tf32")
    assert verdict(values.float(), oracle.float(), oracle, precision="tf32", rounding=limits) is None


@of_each
@ordinary
def test_operands_cut_off_are_wrong(result, problem):
    operands = operands_of(problem)
    assert is_right(in_tf32(result, operands, problem), result, operands, "tf32", problem)
    assert not is_right(
        in_tf32(result, operands, problem, (first_11_bits, first_11_bits)), result, operands, "tf32", problem
    )
    assert not is_right(in_tf32(result, operands, problem, (first_11_bits, to_tf32)), result, operands, "tf32", problem)


@of_each
@ordinary
def test_an_element_without_one_of_its_products_is_wrong(result, problem):
    x, weight, _, g = operands = operands_of(problem)
    # A typical product, so that its loss is typical too.
    product = {FORWARD: (x, weight), "grad_input": (g, weight), "grad_weight": (g, x)}[result]
    values = in_tf32(result, operands, problem)
    values.view(-1)[7] += product[0].std() * product[1].std() / 2
    assert not is_right(values, result, operands, "tf32", problem)


HALVES = (to_tf32, to_tf32), (low, to_tf32), (to_tf32, low)


@of_each
@pytest.mark.parametrize("reason", SMALL)
def test_operands_in_two_parts_are_right(result, reason):
    problem = SMALL[reason]
    operands = operands_of(problem)
    assert is_right(in_tf32(result, operands, problem, *HALVES), result, operands, "tf32x3", problem)


@of_each
@ordinary
@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_two_parts_without_one_of_the_three_products_are_wrong(result, problem, left_out):
    operands = operands_of(problem)
    two = [pair for number, pair in enumerate(HALVES) if number != left_out]
    assert not is_right(in_tf32(result, operands, problem, *two), result, operands, "tf32x3", problem)


@of_each
@ordinary
def test_second_parts_of_eight_bits_are_wrong(result, problem):
    def coarse(tensor):
        return low(tensor).bfloat16().float()

    operands, parts = operands_of(problem), [(to_tf32, to_tf32), (coarse, to_tf32), (to_tf32, coarse)]
    assert not is_right(in_tf32(result, operands, problem, *parts), result, operands, "tf32x3", problem)


@pytest.mark.parametrize("length", [1, 4, 30, 64, 4096])
def test_a_plain_loop_of_float32_is_right_while_it_is_short(length):
    """A thread adds its products one after another."""
    problem = Problem(1, 6, 5, 1, length)
    for seed in range(5):
        x, _, _, g = operands = operands_of(problem, seed)
        products = (x[0, :, None] * g[0]).numpy()
        sums = torch.from_numpy(np.add.accumulate(products, axis=-1)[..., -1:])
        assert problem.terms("grad_weight") == length
        assert is_right(sums, "grad_weight", operands, "ieee", problem) == (length <= accuracy.FEW_TERMS), seed
        assert not is_right(in_tf32("grad_weight", operands, problem), "grad_weight", operands, "ieee", problem)


def test_sums_of_nothing_cost_nothing():
    problem = Problem(0, 4, 6, 3, 11)
    assert accuracy.rounding(FORWARD, operands_of(problem), problem, "tf32") == Error(0, 0)


def test_a_bias_is_part_of_the_result_and_no_product():
    problem = ORDINARY[0]
    operands = operands_of(problem)
    without, with_bias = (
        accuracy.rounding(FORWARD, given, problem, "tf32")
        for given in (operands, operands._replace(bias=torch.full((problem.out_channels,), 1000.0)))
    )
    assert with_bias.norm < without.norm / 500
    assert with_bias.largest < without.largest / 200


def test_only_few_products_in_float32_are_granted_anything():
    problem = Problem(4, 16, 8, 4, 60)  # few enough products that more than the dtype's spacing is granted
    operands = operands_of(problem)
    limits = accuracy.rounding(FORWARD, operands, problem, "ieee")
    doubles = Operands(*(t if t is None else t.double() for t in operands))
    assert right(FORWARD, limits, EXACT, operands, "ieee", problem)
    assert not right(FORWARD, limits, EXACT, doubles, "fp64", problem)
    assert ORDINARY[0].terms(FORWARD) > accuracy.FEW_TERMS == problem.terms(FORWARD)
    assert not right(FORWARD, limits, EXACT, operands_of(ORDINARY[0]), "ieee", ORDINARY[0])
    assert not right(FORWARD, Error(1.01 * limits.norm, 0.0), EXACT, operands, "ieee", problem)
    assert not right(FORWARD, Error(0.0, 1.01 * limits.largest), EXACT, operands, "ieee", problem)
