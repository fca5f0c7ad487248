"""The gradient operators, differentiable themselves.

T(x, w) is linear in each operand, so each gradient's derivatives are T and the gradients again:

    sum of grad_input(g, w) * v  = sum of g * T(v, w)
    sum of grad_weight(g, x) * v = sum of g * T(x, v)

Operands are batched; ``others`` are Parameters and the precision, in the operator's order.
"""

import math
from functools import partial
from typing import NamedTuple

import torch

from numba_tconv.formula.problem import Parameters, Problem

from . import fast_path as direct
from . import torchs, transforms

PARAMETERS = "SymInt stride, SymInt padding, SymInt output_padding, SymInt groups, SymInt dilation, str precision"
SCHEMAS = {
    "grad_input": f"(Tensor grad_output, Tensor weight, SymInt length, {PARAMETERS}) -> Tensor",
    "grad_weight": f"(Tensor grad_output, Tensor input, SymInt kernel_size, {PARAMETERS}) -> Tensor",
    "grad_bias": "(Tensor grad_output, str precision) -> Tensor",
}
for name, schema in SCHEMAS.items():
    torch.library.define(f"numba_tconv::{name}", schema)

grad_input = torch.ops.numba_tconv.grad_input.default
grad_weight = torch.ops.numba_tconv.grad_weight.default
grad_bias = torch.ops.numba_tconv.grad_bias.default


class Arguments(NamedTuple):
    """The forward operator's arguments."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: int
    padding: int
    output_padding: int
    groups: int
    dilation: int
    variant: str
    precision: str

    @property
    def parameters(self) -> Parameters:
        return Parameters(self.stride, self.padding, self.output_padding, self.groups, self.dilation)


def forward(x, weight, others):
    """T(x, weight) by the selected rung."""
    *parameters, precision = others
    operator = torch.ops.numba_tconv.conv_transpose1d.default
    return transforms.apply(operator, x, weight, None, *parameters, "", precision)


def problem_of(grad_output, in_channels, length, kernel_size, parameters: Parameters) -> Problem:
    """The forward problem with output shape ``grad_output``. Raises RuntimeError if lengths differ."""
    batch, out_channels, out_length = grad_output
    problem = Problem(batch, in_channels, out_channels, kernel_size, length, *parameters)
    if problem.out_length != out_length:
        raise RuntimeError(
            f"grad_output must have the {problem.out_length} samples of the output of {problem}, got {out_length}"
        )
    return problem


def _product_jvp(operator, tangents, arguments):
    first, second, *others = arguments
    with_first = transforms.apply(operator, tangents[0], second, *others)
    return with_first + transforms.apply(operator, first, tangents[1], *others)


def _save_operands(ctx, inputs, output):
    """Context of grad_input and grad_weight, whose inputs are two tensors, a size, and others."""
    ctx.save_for_backward(*inputs[:2])
    ctx.others = inputs[3:]


# grad_input


@direct.implementation(grad_input, "cpu")
def _input_cpu(grad_output, weight, length, *others):
    parameters = Parameters(*others[:-1])
    problem_of(grad_output.shape, weight.shape[0], length, weight.shape[2], parameters)
    return torchs_input(grad_output, weight, length, parameters)


@torch.library.register_fake("numba_tconv::grad_input")
def _input_fake(grad_output, weight, length, *others):
    return grad_output.new_empty((grad_output.shape[0], weight.shape[0], length))


def _input_backward(ctx, v):
    grad_output, weight = ctx.saved_tensors
    for_grad_output = for_weight = None
    if ctx.needs_input_grad[0]:
        for_grad_output = forward(v, weight, ctx.others)
    if ctx.needs_input_grad[1]:
        for_weight = transforms.apply(grad_weight, grad_output, v, weight.shape[2], *ctx.others)
    return for_grad_output, for_weight, *[None] * 7


# grad_weight


@direct.implementation(grad_weight, "cpu")
def _weight_cpu(grad_output, input, kernel_size, *others):
    parameters = Parameters(*others[:-1])
    problem_of(grad_output.shape, *input.shape[1:], kernel_size, parameters)
    return torchs_weight(grad_output, input, kernel_size, parameters)


@torch.library.register_fake("numba_tconv::grad_weight")
def _weight_fake(grad_output, input, kernel_size, *others):
    groups = Parameters(*others[:-1]).groups
    return input.new_empty((input.shape[1], grad_output.shape[1] // groups, kernel_size))


def _weight_backward(ctx, v):
    grad_output, input = ctx.saved_tensors
    for_grad_output = for_input = None
    if ctx.needs_input_grad[0]:
        for_grad_output = forward(input, v, ctx.others)
    if ctx.needs_input_grad[1]:
        for_input = transforms.apply(grad_input, grad_output, v, input.shape[2], *ctx.others)
    return for_grad_output, for_input, *[None] * 7


# grad_bias


@direct.implementation(grad_bias, "cpu")
def _bias_cpu(grad_output, precision):
    return grad_output.sum((0, 2))


@torch.library.register_fake("numba_tconv::grad_bias")
def _bias_fake(grad_output, precision):
    return grad_output.new_empty((grad_output.shape[1],))


def _bias_context(ctx, inputs, output):
    ctx.shape = inputs[0].shape


def _bias_backward(ctx, v):
    return v[:, None].expand(ctx.shape), None


def _bias_jvp(tangents, arguments):
    return transforms.apply(grad_bias, tangents[0], arguments[1])


transforms.register(grad_input, _input_backward, _save_operands, partial(_product_jvp, grad_input))
transforms.register(grad_weight, _weight_backward, _save_operands, partial(_product_jvp, grad_weight))
transforms.register(grad_bias, _bias_backward, _bias_context, _bias_jvp)


# The forward operator's derivative


def setup_context(ctx, inputs, output):
    given = Arguments(*inputs)
    constants = constants_of(given.input.shape, given.weight.shape, given.parameters, given.precision)
    keep(constants, ctx, given.input, given.weight)


def constants_of(input, weight, parameters: Parameters, precision: str) -> tuple:
    """Length, kernel size, parameters, precision, for the shapes ``input`` and ``weight``."""
    return input[2], weight[2], *parameters, precision


def keep(constants, ctx, input, weight, bias=None):
    ctx.constants = constants
    wants_input, wants_weight, *_ = ctx.needs_input_grad
    ctx.save_for_backward(input if wants_weight else None, weight if wants_input else None)


def backward(ctx, grad_output, input, weight):
    """Gradients for input, weight, bias; None if not wanted."""
    length, kernel_size, *parameters = ctx.constants
    wants_input, wants_weight, wants_bias, *_ = ctx.needs_input_grad
    return (
        transforms.apply(grad_input, grad_output, weight, length, *parameters) if wants_input else None,
        transforms.apply(grad_weight, grad_output, input, kernel_size, *parameters) if wants_weight else None,
        transforms.apply(grad_bias, grad_output, parameters[-1]) if wants_bias else None,
    )


def jvp(tangents, arguments):
    without_bias = Arguments(*arguments)._replace(bias=None)
    tangent = _product_jvp(torch.ops.numba_tconv.conv_transpose1d.default, tangents, without_bias)
    return tangent if tangents[2] is None else tangent + tangents[2][:, None]


# torch's own gradients


def torchs_input(grad_output, weight, length: int, parameters: Parameters):
    shape = grad_output.shape[0], weight.shape[0], length
    if not grad_output.numel():  # torch's convolution refuses it
        return grad_output.new_zeros(shape)
    # An ordinary convolution would round otherwise.
    input = _shape_alone(shape, grad_output)
    return _torchs(grad_output, input, weight, parameters, [True, False, False])[0]


def torchs_weight(grad_output, input, kernel_size: int, parameters: Parameters):
    shape = input.shape[1], grad_output.shape[1] // parameters.groups, kernel_size
    if not grad_output.numel():
        return input.new_zeros(shape)
    weight = _shape_alone(shape, input)
    return _torchs(grad_output, input, weight, parameters, [False, True, False])[1]


def _shape_alone(shape, like):
    """A contiguous tensor without values, on memory of ``like`` if enough."""
    if like.is_contiguous() and like.numel() >= math.prod(shape):
        return like.view(-1)[: math.prod(shape)].view(shape)
    return like.new_empty(shape)


def _torchs(grad_output, input, weight, parameters, wanted):
    gradients = torchs.gradients(grad_output, input, weight, None, parameters, wanted)
    return [None if gradient is None else gradient.contiguous() for gradient in gradients]
