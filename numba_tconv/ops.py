"""The operator ``numba_tconv::conv_transpose1d``: checks, CUDA and CPU implementations, shapes for tracing, gradients.

Registered with torch.library, so that autograd, torch.compile, torch.export and FakeTensor see one opaque operator.
It takes batched input and plain integers; ``functional.conv_transpose1d`` is its public face. Its gradients are
operators too (kernels/grad_ops.py); which kernels compute them on a GPU is decided here.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from . import direct, transforms
from .kernels import RUNGS, device, grad_ops, gradients
from .kernels.rung import Rung
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
    _check_kinds(input, weight, bias)
    shapes = input.shape, weight.shape, None if bias is None else bias.shape
    return _problem(*shapes, stride, padding, output_padding, groups, dilation)


def _check_kinds(input, weight, bias) -> None:
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != input.dtype:
            raise RuntimeError(f"{name} must have the dtype of input, {input.dtype}, got {tensor.dtype}")
        if tensor is not None and tensor.device != input.device:
            raise RuntimeError(f"{name} must be on the device of input, {input.device}, got {tensor.device}")


def _problem(input, weight, bias, stride, padding, output_padding, groups, dilation) -> Problem:
    """The problem by the shapes of the tensors, of ``bias`` None if there is none."""
    if len(input) != 3:
        raise RuntimeError(f"input must be (N, C_in, L) or (C_in, L), got shape {tuple(input)}")
    if len(weight) != 3:
        raise RuntimeError(f"weight must be (C_in, C_out/groups, K), got shape {tuple(weight)}")
    if input[1] != weight[0]:
        raise RuntimeError(
            f"input must have the {weight[0]} channels of weight's first dimension, got {input[1]}: "
            f"shapes {tuple(input)} and {tuple(weight)}"
        )
    out_channels = weight[1] * groups
    batch, in_channels, length = input
    problem = Problem(
        *(batch, in_channels, out_channels, weight[2], length),
        *(stride, padding, output_padding, groups, dilation, bias is not None),
    )
    if bias is not None and (len(bias) != 1 or bias[0] != out_channels):
        raise RuntimeError(f"bias must have shape ({out_channels},), got {tuple(bias)}")
    return problem


@direct.implementation(conv_transpose1d, "cuda")
def _cuda(input, weight, bias, stride, padding, output_padding, groups, dilation, variant, precision):
    _check_kinds(input, weight, bias)
    problem, rung, precision = _planned(
        *(input.shape, weight.shape, None if bias is None else bias.shape),
        *(stride, padding, output_padding, groups, dilation, variant, precision),
        *(input.dtype, input.device.index),
    )
    output = input.new_empty((problem.batch, problem.out_channels, problem.out_length))
    if output.numel():
        with device.current(input.device.index):
            rung.run(input, weight, bias, output, problem, precision=precision)
    return output


@lru_cache(maxsize=1024)
def _planned(
    input, weight, bias, stride, padding, output_padding, groups, dilation, variant, precision, dtype, index
) -> tuple[Problem, Rung, str]:
    """The problem by the shapes of the tensors, and its plan; remembered, so that a repeated call pays for one look-up
    only. ``index``: torch's, of the GPU."""
    problem = _problem(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return problem, *_plan(problem, dtype, variant, precision, device.of(index))


@lru_cache(maxsize=1024)
def _plan(problem: Problem, dtype: torch.dtype, variant: str, precision: str, gpu: device.Device) -> tuple[Rung, str]:
    """The rung, and its precision."""
    precision = arithmetic(problem, dtype, variant, precision, gpu)
    candidates = [RUNGS[variant]] if variant else RUNGS.values()
    refusals = {rung.name: rung.refusal(problem, dtype, precision, gpu) for rung in candidates}
    if all(refusals.values()):
        raise NotImplementedError("; ".join(f"{name} cannot do {problem}: {why}" for name, why in refusals.items()))
    if problem.out_length >= 2**63:
        raise RuntimeError(f"the output of {problem} would have {problem.out_length} samples")
    return RUNGS[variant] if variant else select(problem, dtype, precision, gpu), precision


@direct.implementation(conv_transpose1d, "cpu")
def _cpu(input, weight, bias, stride, padding, output_padding, groups, dilation, variant, precision):
    check(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return torch.conv_transpose1d(input, weight, bias, stride, padding, output_padding, groups, dilation).contiguous()


@torch.library.register_fake(NAME)
def _fake(input, weight, bias, stride, padding, output_padding, groups, dilation, variant, precision):
    problem = check(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return input.new_empty((problem.batch, problem.out_channels, problem.out_length))


# The gradients

transforms.register(conv_transpose1d, grad_ops.backward, grad_ops.setup_context, grad_ops.jvp)


@lru_cache(maxsize=1024)
def gradient_precision(of: str, problem: Problem, dtype: torch.dtype, precision: str, gpu: device.Device) -> str | None:
    """The precision in which a GPU computes the gradient ``of`` ("grad_input", "grad_weight" or "grad_bias") by kernels
    of this package; None where torch's own operators do.

    Where the forward pass is meant for tensor cores, so are its gradients: by rungs of this package that are meant for
    such a problem, or that memory limits wherever they multiply, else by torch. "tf32x3" promises errors like those of
    float32, so its gradients are formed as in "ieee"; torch's could be rounded to TF32. torch also computes what no
    kernel can on that GPU.
    """
    precision = arithmetic(problem, dtype, "", precision, gpu)
    precision = "ieee" if precision == "tf32x3" else precision
    rungs = [rung for rung in gradients.GRADIENTS.values() if rung.of == of]
    able = [rung for rung in rungs if rung.refusal(problem, dtype, precision, gpu) is None]
    if precision in ("tf32", "fp16", "bf16"):
        meant = [r for r in able if not r.unsuited(problem, dtype, precision, gpu)]
        able = [rung for rung in meant if rung.tensor_cores or rung.memory_bound]
    return precision if able else None


def _precision_of(of, problem, grad_output, precision):
    return gradient_precision(of, problem, grad_output.dtype, precision, device.of(grad_output.device.index))


@direct.implementation(grad_ops.grad_input, "cuda")
def _grad_input(grad_output, weight, length, *parameters):
    problem = grad_ops.problem_of(grad_output, weight.shape[0], length, weight.shape[2], parameters)
    precision = _precision_of("grad_input", problem, grad_output, parameters[-1])
    if precision is None:
        return grad_ops.torchs_input(grad_output, weight, length, parameters)
    return gradients.grad_input(grad_output, weight, problem, precision=precision)


@direct.implementation(grad_ops.grad_weight, "cuda")
def _grad_weight(grad_output, input, kernel_size, *parameters):
    problem = grad_ops.problem_of(grad_output, *input.shape[1:], kernel_size, parameters)
    precision = _precision_of("grad_weight", problem, grad_output, parameters[-1])
    if precision is None:
        return grad_ops.torchs_weight(grad_output, input, kernel_size, parameters)
    return gradients.grad_weight(grad_output, input, problem, precision=precision)


@direct.implementation(grad_ops.grad_bias, "cuda")
def _grad_bias(grad_output, precision):
    if not grad_output.numel():
        return grad_output.new_zeros((grad_output.shape[1],))
    problem = _sum_problem(*grad_output.shape)
    own = _precision_of("grad_bias", problem, grad_output, precision)
    if own is None:
        return grad_output.sum((0, 2))
    return gradients.grad_bias(grad_output, problem, precision=own)


@lru_cache(maxsize=1024)
def _sum_problem(batch: int, channels: int, length: int) -> Problem:
    """The sum asks for nothing but the sizes of grad_output: it is that of a problem with one tap and no stride."""
    return Problem(batch, channels, channels, 1, length, groups=channels)
