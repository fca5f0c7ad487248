"""The scatter reference against torch in float64 on the CPU: forward and the three gradients."""

import ast
import inspect
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given

import reference

from .parity import SMALL, operands, parameters
from .strategies import problems


def close(ours, theirs, terms):
    """Equal but for the order of ``terms`` additions of numbers near one."""
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=1e-14 * terms)


@given(problems())
def test_forward_and_gradients(problem):
    p = problem
    x, w, bias = (None if t is None else t.requires_grad_() for t in operands(p, torch.float64))
    y = torch.conv_transpose1d(x, w, bias, **parameters(p))
    grad_output = torch.randn_like(y)
    y.backward(grad_output)

    numbers = x.detach().numpy(), w.detach().numpy(), None if bias is None else bias.detach().numpy()
    close(reference.conv_transpose1d(*numbers, **parameters(p)), y, p.in_channels * p.kernel_size + 1)
    walk = {key: value for key, value in parameters(p).items() if key != "output_padding"}
    ours = reference.grad_input(grad_output.numpy(), numbers[1], p.length, **walk)
    close(ours, x.grad, p.out_channels * p.kernel_size)
    ours = reference.grad_weight(grad_output.numpy(), numbers[0], p.kernel_size, **walk)
    close(ours, w.grad, p.batch * p.length)
    if p.bias:
        close(reference.grad_bias(grad_output.numpy()), bias.grad, p.batch * p.out_length)


def test_unbatched_is_a_batch_of_one():
    p = replace(SMALL["groups, unequal channels"], dilation=3, length=7)
    x, w, bias = (t.numpy() for t in operands(p, torch.float64))
    y = reference.conv_transpose1d(x[0], w, bias, **parameters(p))
    np.testing.assert_array_equal(y, reference.conv_transpose1d(x[:1], w, bias, **parameters(p))[0])
    walk = {"stride": p.stride, "padding": p.padding, "groups": p.groups, "dilation": p.dilation}
    for unbatched, batched in (
        (reference.grad_input(y, w, p.length, **walk), reference.grad_input(y[None], w, p.length, **walk)[0]),
        (reference.grad_weight(y, x[0], 4, **walk), reference.grad_weight(y[None], x[:1], 4, **walk)),
        (reference.grad_bias(y), reference.grad_bias(y[None])),
    ):
        np.testing.assert_array_equal(unbatched, batched)


def test_nested_lists_and_the_definition_by_hand():
    # Two samples, stride 2, taps (10, 1): 3 lands at 0 and 1 of the output, 5 at 2 and 3.
    assert reference.conv_transpose1d([[[3, 5]]], [[[10, 1]]], [100], stride=2).tolist() == [[[130, 103, 150, 105]]]


def test_sums_in_float64_whatever_comes_in():
    x, w = np.full((1, 3, 1), 1, dtype=np.float16), np.array([[[2048]], [[1]], [[1]]], dtype=np.float16)
    assert reference.conv_transpose1d(x, w).tolist() == [[[2050.0]]]


def test_imports_numpy_alone():
    tree = ast.parse(inspect.getsource(reference.scatter))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"numpy"}
