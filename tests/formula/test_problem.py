"""Problem against torch: equal output lengths and refusals. Its counts against a count by hand."""

import dataclasses
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from numba_tconv.formula.problem import COPY_BANDWIDTH, PEAK_FLOPS, Problem
from reference.scatter import _products
from tests.parity import operands, parameters
from tests.strategies import problems


@given(problems())
def test_out_length_and_minimum_bytes_are_those_of_torchs_tensors(problem):
    x, w, bias = operands(problem, torch.float32)
    y = torch.conv_transpose1d(x, w, bias, **parameters(problem))
    assert (x.shape, w.shape, y.shape) == (problem.in_shape, problem.weight_shape, problem.out_shape)
    elements = x.numel() + w.numel() + y.numel() + (bias.numel() if problem.bias else 0)
    assert problem.min_bytes(2) == 2 * elements
    assert problem.min_bytes(4) == 4 * elements


@given(problems())
def test_flops_are_two_for_every_product_of_the_definition(problem):
    p = problem
    uncropped = p.out_length + 2 * p.padding
    products = _products(p.in_shape, p.weight_shape, uncropped, p.stride, 0, p.groups, p.dilation)
    assert p.flops == 2 * sum(1 for _ in products)


@given(problems())
def test_no_sum_has_more_terms(problem):
    """A convolution of ones, without cropping, and its gradients count the terms."""
    p = replace(problem, padding=0)
    x, w, _ = (None if t is None else torch.ones_like(t).requires_grad_() for t in operands(p, torch.float64))
    y = torch.conv_transpose1d(x, w, **parameters(p))
    y.backward(torch.ones_like(y))
    assert y.max() <= p.terms()
    assert x.grad.max() == p.terms("grad_input")
    assert w.grad.max() == p.terms("grad_weight")
    assert p.terms("grad_bias") == p.batch * y.shape[2]


@given(problems(), st.sampled_from(sorted(PEAK_FLOPS)))
def test_floor_is_the_slower_of_memory_and_arithmetic(problem, peak):
    memory = problem.min_bytes(4) / COPY_BANDWIDTH * 1e3
    arithmetic = problem.flops / PEAK_FLOPS[peak] * 1e3
    assert problem.floor_ms(4, peak) == pytest.approx(max(memory, arithmetic), rel=1e-12)
    assert problem.floor_ms(4, peak, bandwidth=1e-6) == pytest.approx(problem.min_bytes(4) / 1e-6 * 1e3, rel=1e-12)


number = st.integers(-1, 4)


@given(
    st.builds(
        dict,
        stride=number,
        padding=st.integers(-1, 9),
        output_padding=number,
        groups=st.integers(-1, 3),
        dilation=number,
    ),
    st.tuples(st.integers(1, 2), st.integers(0, 4), st.integers(0, 3), st.integers(0, 4), st.integers(0, 4)),
)
@example({"output_padding": 3, "stride": 2, "dilation": 3}, (1, 2, 2, 3, 4))
@example({"output_padding": 2, "stride": 2, "dilation": 3}, (1, 2, 2, 3, 4))
@example({"padding": 3}, (1, 2, 2, 3, 4))
@example({"padding": 4}, (1, 2, 2, 3, 4))
@example({"groups": 2, "output_padding": 1, "stride": 2}, (2, 4, 3, 4, 4))
@example({"dilation": 0}, (2, 1, 1, 1, 1))
def test_refuses_what_torch_refuses(arguments, sizes):
    batch, in_channels, out_per_group, kernel_size, length = sizes
    out_channels = out_per_group * arguments.get("groups", 1)
    # For batches, torch's float32 backend takes a dilation of 0; its others refuse it.
    x = torch.ones(batch, in_channels, length, dtype=torch.float64)
    w = torch.ones(in_channels, out_per_group, kernel_size, dtype=torch.float64)
    try:
        theirs = torch.conv_transpose1d(x, w, **arguments).shape[2]
    except RuntimeError:
        theirs = None
    try:
        problem = Problem(batch, in_channels, out_channels, kernel_size, length, **arguments)
        ours = problem.out_length if problem.has_torchs_padding else None
    except RuntimeError:
        ours = None
    # torch's backends differ on outputs without samples.
    assert ours == theirs or (ours == 0 and theirs is None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride": 0}, "stride must be positive, got 0"),
        ({"padding": -1}, "padding must not be negative, got -1"),
        ({"dilation": -2}, "dilation must be positive, got -2"),
        ({"output_padding": 2, "stride": 2}, "output_padding must exceed padding by less than the larger of stride"),
        ({"groups": 0}, "groups must be positive, got 0"),
        ({"groups": 3}, "in_channels must be divisible by groups, got 4 and 3"),
        ({"groups": 4}, "out_channels must be divisible by groups, got 6 and 4"),
        ({"kernel_size": 0}, "kernel_size must be positive, got 0"),
        ({"length": 0}, "length must be positive"),
        ({"in_channels": 0}, "in_channels must be positive, got 0"),
        ({"out_channels": 0}, "out_channels must be positive, got 0"),
        ({"batch": -1}, "batch must not be negative, got -1"),
        ({"padding": 6}, "padding 6 leaves a negative output length"),
    ],
)
def test_a_refusal_names_the_argument(change, message):
    with pytest.raises(RuntimeError, match=message):
        Problem(**{"batch": 2, "in_channels": 4, "out_channels": 6, "kernel_size": 3, "length": 8, **change})


def test_an_empty_batch_may_have_an_empty_length():
    assert Problem(0, 2, 2, 3, 0, padding=1).out_length == 0


def test_frozen_and_usable_as_a_key():
    problem = Problem(1, 2, 2, 3, 4)
    assert {problem: "known"}[Problem(1, 2, 2, 3, 4)] == "known"
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.stride = 2


def test_shown_with_what_differs_from_the_default():
    assert str(Problem(2, 4, 6, 3, 8)) == "(2, 4->6, k3, s1, L 8)"
    shown = str(Problem(2, 4, 6, 3, 8, stride=2, padding=1, output_padding=1, groups=2, dilation=3, bias=True))
    assert shown == "(2, 4->6, k3, s2, p1, op1, d3, groups 2, L 8, bias)"


def test_calls_of_a_layer_have_it_in_common():
    calls = [
        Problem(batch, 4, 6, 3, length, stride=2, padding=50, output_padding=output_padding, groups=2, bias=bias)
        for batch, length, output_padding, bias in ((3, 90, 0, True), (0, 100, 1, False), (1, 1 << 20, 0, False))
    ]
    assert len({call.layer for call in calls}) == 1
    assert calls[0].layer == dataclasses.replace(calls[0].layer.layer)
    assert calls[0].layer != dataclasses.replace(calls[0], padding=49).layer


def test_equal_problems_are_one_key():
    one, same, other = (Problem(2, 4, 6, 3, 9, stride=2, bias=bias) for bias in (True, True, False))
    assert hash(one) == hash(same) == hash(pickle.loads(pickle.dumps(one)))
    assert {one: 1}[same] == 1
    assert {one, same, other} == {one, other}
