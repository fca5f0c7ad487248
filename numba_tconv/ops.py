"""The operator ``numba_tconv::conv_transpose1d``: checks, CUDA and CPU implementations, shapes for tracing, gradients.

Registered with torch.library, so that autograd, torch.compile, torch.export and FakeTensor see one opaque operator.
It takes batched input and plain integers; ``functional.conv_transpose1d`` is its public face.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .kernels import RUNGS, device
from .problem import Problem
from .select import arithmetic, select

NAME = "numba_tconv::conv_transpose1d"

torch.library.define(
    NAME,
    "(Tensor input, Tensor weight, Tensor? bias, SymInt stride, SymInt padding, SymInt output_padding, SymInt groups, "
    "SymInt dilation, str variant, str precision) -> Tensor",
)
# `variant` is a rung's name, or "" for the one that `select` picks; `precision` is one of functional.PRECISIONS, or
# select.TF32_ALLOWED. The operator asks no switch of torch, so that a traced graph means the same whenever it runs.
conv_transpose1d = torch.ops.numba_tconv.conv_transpose1d.default


def check(input, weight, bias, stride, padding, output_padding, groups, dilation) -> Problem:
    """The problem that the arguments state, or the error that torch raises for them, whatever the device.

    Reads shapes, dtypes and devices only. Raises RuntimeError naming the argument at fault.
    """
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != input.dtype:
            raise RuntimeError(f"{name} must have the dtype of input, {input.dtype}, got {tensor.dtype}")
        if tensor is not None and tensor.device != input.device:
            raise RuntimeError(f"{name} must be on the device of input, {input.device}, got {tensor.device}")
    if input.dim() != 3:
        raise RuntimeError(f"input must be (N, C_in, L) or (C_in, L), got shape {tuple(input.shape)}")
    if weight.dim() != 3:
        raise RuntimeError(f"weight must be (C_in, C_out/groups, K), got shape {tuple(weight.shape)}")
    if input.shape[1] != weight.shape[0]:
        raise RuntimeError(
            f"input must have the {weight.shape[0]} channels of weight's first dimension, got {input.shape[1]}: "
            f"shapes {tuple(input.shape)} and {tuple(weight.shape)}"
        )
    out_channels = weight.shape[1] * groups
    batch, in_channels, length = input.shape
    problem = Problem(
        *(batch, in_channels, out_channels, weight.shape[2], length),
        *(stride, padding, output_padding, groups, dilation, bias is not None),
    )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != out_channels):
        raise RuntimeError(f"bias must have shape ({out_channels},), got {tuple(bias.shape)}")
    return problem


@torch.library.impl(NAME, "cuda")
def _cuda(input, weight, bias, stride, padding, output_padding, groups, dilation, variant, precision):
    problem = check(input, weight, bias, stride, padding, output_padding, groups, dilation)
    rung, precision = _plan(problem, input.dtype, variant, precision, device.of(input.device.index))
    output = input.new_empty((problem.batch, problem.out_channels, problem.out_length))
    if output.numel():
        with torch.cuda.device(input.device):
            rung.run(input, weight, bias, output, problem, precision=precision)
    return output


@lru_cache(maxsize=1024)
def _plan(problem: Problem, dtype: torch.dtype, variant: str, precision: str, gpu: device.Device):
    """The rung, and its precision; remembered, so that a repeated call pays for a dictionary look-up only."""
    precision = arithmetic(problem, dtype, variant, precision, gpu)
    candidates = [RUNGS[variant]] if variant else RUNGS.values()
    refusals = {rung.name: rung.refusal(problem, dtype, precision, gpu) for rung in candidates}
    if all(refusals.values()):
        raise NotImplementedError("; ".join(f"{name} cannot do {problem}: {why}" for name, why in refusals.items()))
    if problem.out_length >= 2**63:
        raise RuntimeError(f"the output of {problem} would have {problem.out_length} samples")
    return RUNGS[variant] if variant else select(problem, dtype, precision, gpu), precision


@torch.library.impl(NAME, "cpu")
def _cpu(input, weight, bias, stride, padding, output_padding, groups, dilation, variant, precision):
    check(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return torch.conv_transpose1d(input, weight, bias, stride, padding, output_padding, groups, dilation).contiguous()


@torch.library.register_fake(NAME)
def _fake(input, weight, bias, stride, padding, output_padding, groups, dilation, variant, precision):
    problem = check(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return input.new_empty((problem.batch, problem.out_channels, problem.out_length))


def _keep(ctx, inputs, output):
    input, weight, bias, *ctx.parameters, _, _ = inputs
    ctx.bias_sizes = None if bias is None else bias.shape
    ctx.save_for_backward(input, weight)


def _backward(ctx, grad_output):
    """Gradients by torch's own convolution_backward, for those inputs that require one."""
    input, weight = ctx.saved_tensors
    stride, padding, output_padding, groups, dilation = ctx.parameters
    wanted = ctx.needs_input_grad[:3]
    gradients = torch.ops.aten.convolution_backward(
        *(grad_output, input, weight, ctx.bias_sizes),
        *([stride], [padding], [dilation], True, [output_padding], groups, wanted),
    )
    # Where no gradient was asked for, convolution_backward may still return something.
    return *(g if w else None for g, w in zip(gradients, wanted, strict=True)), *[None] * 7


torch.library.register_autograd(NAME, _backward, setup_context=_keep)
