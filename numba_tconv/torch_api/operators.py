"""The operator ``numba_tconv::conv_transpose1d``, and the gradient operators on GPUs."""

from collections.abc import Callable
from functools import lru_cache, partial

import torch

from numba_tconv.formula.precision import TF32_ALLOWED
from numba_tconv.formula.problem import Parameters, Problem
from numba_tconv.gradients.rung import GradientRung
from numba_tconv.kernels.rung import Rung
from numba_tconv.runtime import device
from numba_tconv.runtime.layout import Layout, layout_of
from numba_tconv.runtime.ready import Ready
from numba_tconv.selection import gradient as gradients
from numba_tconv.selection import joined as join
from numba_tconv.selection.forward import arithmetic, decide
from numba_tconv.selection.registry import RUNGS

from . import fast_path as direct
from . import flops, torchs, transforms
from . import gradient_operators as grad_ops

NAME = "numba_tconv::conv_transpose1d"

torch.library.define(
    NAME,
    "(Tensor input, Tensor weight, Tensor? bias, SymInt stride, SymInt padding, SymInt output_padding, SymInt groups, "
    "SymInt dilation, str variant, str precision) -> Tensor",
)
# `variant`: a rung's name, or "" to select. `precision`: of PRECISIONS, or TF32_ALLOWED. No switch is read, so a traced
# graph keeps its meaning.
conv_transpose1d = torch.ops.numba_tconv.conv_transpose1d.default


def check(input, weight, bias, stride, padding, output_padding, groups, dilation) -> Problem:
    """The problem, validated by shapes, dtypes and devices. Raises RuntimeError, naming the argument."""
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


def computes_on(index: int) -> bool:
    return index >= 0


@direct.implementation(conv_transpose1d, "cuda")
def _cuda(input, weight, bias, *parameters):
    _check_kinds(input, weight, bias)
    laid_out = layout_of(input), layout_of(weight), None if bias is None else layout_of(bias)
    return ready(*laid_out, *parameters)(input, weight, bias)


@lru_cache(maxsize=1024)
def ready(input, weight, bias, stride, padding, output_padding, groups, dilation, variant, precision) -> Callable:
    """The function for these layouts (None without bias). Raises as the operator."""
    laid_out = [one and Layout(*one) for one in (input, weight, bias)]
    shapes = (one and one.shape for one in laid_out)
    problem = _problem(*shapes, stride, padding, output_padding, groups, dilation)
    dtype, index = laid_out[0].dtype, laid_out[0].index
    shape = problem.out_shape
    if 0 in shape:
        return Ready(shape, dtype, index, lambda *_: None)
    rung, own = _plan(problem, dtype, variant, precision, device.of(index))
    if rung is None:
        sizes = stride, padding, output_padding, groups, dilation
        return lambda input, weight, bias: torchs.without_views(input, weight, bias, *sizes)
    joint = None if variant else join.joined(problem, dtype, precision, device.of(index))
    if joint:
        p, x = joint.problem, Layout.contiguous((1, problem.in_channels, joint.problem.length), dtype, index)
        compute = ready(x, weight, bias, stride, 0, p.output_padding, groups, 1, "", precision)
        return Ready(shape, dtype, index, join.forward(joint, problem, laid_out[0], compute))
    output = Layout.contiguous(shape, dtype, index)
    return Ready(shape, dtype, index, rung.prepare(*laid_out, output, problem, precision=own))


@lru_cache(maxsize=1024)
def _plan(
    problem: Problem, dtype: torch.dtype, variant: str, precision: str, gpu: device.Device
) -> tuple[Rung | None, str]:
    """The rung, None where torch computes, and its precision."""
    precision = arithmetic(problem, dtype, variant, precision, gpu)
    decision = None if variant else decide(problem, dtype, precision, gpu)
    if decision and decision.by_torch:
        return None, precision
    candidates = [RUNGS[variant]] if variant else RUNGS.values()
    refusals = {rung.name: rung.refusal(problem, dtype, precision, gpu) for rung in candidates}
    if all(refusals.values()):
        raise NotImplementedError("; ".join(f"{name} cannot do {problem}: {why}" for name, why in refusals.items()))
    if problem.out_length >= 2**63:
        raise RuntimeError(f"the output of {problem} would have {problem.out_length} samples")
    return RUNGS[variant] if variant else decision.rung, precision


@direct.implementation(conv_transpose1d, "cpu")
def _cpu(input, weight, bias, *others):
    parameters = Parameters(*others[:-2])
    check(input, weight, bias, *parameters)
    return torchs.without_views(input, weight, bias, *parameters)


@torch.library.register_fake(NAME)
def _fake(input, weight, bias, *others):
    if isinstance(length := input.shape[-1], torch.SymInt):
        torch._check(length > 0)
    problem = check(input, weight, bias, *Parameters(*others[:-2]))
    return input.new_empty(problem.out_shape)


# The gradients


@lru_cache(maxsize=1024)
def gradient_precision(of: str, problem: Problem, dtype: torch.dtype, precision: str, gpu: device.Device) -> str | None:
    """Precision of the gradient ``of``; None where torch computes it.

    Tensor-core precisions need a suited rung that uses tensor cores or is limited by memory; "tf32x3" becomes "ieee".
    If torch computes the forward pass, it computes the gradients too, except grad_bias.
    """
    own = arithmetic(problem, dtype, "", precision, gpu)
    if of != "grad_bias" and decide(problem, dtype, own, gpu).by_torch:
        return None
    if precision == TF32_ALLOWED and own == "ieee" and _gains(of, problem, dtype, "tf32", gpu):
        return "tf32"
    own = "ieee" if own == "tf32x3" else own
    able = _gains if own in ("tf32", "fp16", "bf16") else _able
    return own if able(of, problem, dtype, own, gpu) else None


def _able(of: str, problem: Problem, dtype: torch.dtype, precision: str, gpu: device.Device) -> list[GradientRung]:
    rungs = (rung for rung in gradients.GRADIENTS.values() if rung.of == of)
    return [rung for rung in rungs if rung.refusal(problem, dtype, precision, gpu) is None]


def _gains(of: str, problem: Problem, dtype: torch.dtype, precision: str, gpu: device.Device) -> list[GradientRung]:
    meant = (r for r in _able(of, problem, dtype, precision, gpu) if not r.unsuited(problem, dtype, precision, gpu))
    return [rung for rung in meant if rung.tensor_cores or rung.memory_bound]


@lru_cache(maxsize=1024)
def ready_input(grad_output, weight, length, *others) -> Callable:
    parameters, precision = Parameters(*others[:-1]), others[-1]
    problem = grad_ops.problem_of(grad_output[0], weight[0][0], length, weight[0][2], parameters)
    return _ready("grad_input", problem, grad_output, weight, precision=precision) or (
        lambda grad_output, weight: grad_ops.torchs_input(grad_output, weight, length, parameters)
    )


@lru_cache(maxsize=1024)
def ready_weight(grad_output, input, kernel_size, *others) -> Callable:
    parameters, precision = Parameters(*others[:-1]), others[-1]
    problem = grad_ops.problem_of(grad_output[0], *input[0][1:], kernel_size, parameters)
    return _ready("grad_weight", problem, grad_output, input, precision=precision) or (
        lambda grad_output, input: grad_ops.torchs_weight(grad_output, input, kernel_size, parameters)
    )


@lru_cache(maxsize=1024)
def ready_bias(grad_output, precision) -> Callable:
    shape, *_ = grad_output
    if 0 in shape:
        return lambda grad_output: grad_output.new_zeros((shape[1],))
    problem = sum_problem(shape)
    return _ready("grad_bias", problem, grad_output, precision=precision) or (
        lambda grad_output: grad_output.sum((0, 2))
    )


def sum_problem(shape: tuple[int, int, int]) -> Problem:
    """A problem with output ``shape``."""
    batch, channels, length = shape
    return Problem(batch, channels, channels, 1, length, groups=channels)


def _ready(of, problem, *operands, precision) -> Ready | None:
    laid_out = [Layout(*operand) for operand in operands]
    if 0 in laid_out[0].shape:
        return gradients.ready(of, problem, *operands)
    dtype, gpu = laid_out[0].dtype, device.of(laid_out[0].index)
    own = gradient_precision(of, problem, dtype, precision, gpu)
    if not own:
        return None
    joint = of != "grad_bias" and join.joined(problem, dtype, own, gpu)
    if joint and (together := join.gradient(of, joint, problem, *laid_out, partial(_ready, precision=precision))):
        return together
    return gradients.ready(of, problem, *operands, precision=own)


@direct.implementation(grad_ops.grad_input, "cuda")
def _grad_input(grad_output, weight, *parameters):
    return ready_input(layout_of(grad_output), layout_of(weight), *parameters)(grad_output, weight)


@direct.implementation(grad_ops.grad_weight, "cuda")
def _grad_weight(grad_output, input, *parameters):
    return ready_weight(layout_of(grad_output), layout_of(input), *parameters)(grad_output, input)


@direct.implementation(grad_ops.grad_bias, "cuda")
def _grad_bias(grad_output, precision):
    return ready_bias(layout_of(grad_output), precision)(grad_output)


def backward(ctx, grad_output):
    input, weight = ctx.saved_tensors
    if (
        torch.compiler.is_dynamo_compiling()
        or not computes_on(grad_output.get_device())
        or not direct.is_clear(grad_output, input, weight)
        or direct.wants_gradient(grad_output, input, weight)
    ):
        return *grad_ops.backward(ctx, grad_output, input, weight), *[None] * 7
    for_input, for_weight, for_bias = _ready_gradients(
        *(layout_of(grad_output), input if input is None else layout_of(input)),
        *(weight if weight is None else layout_of(weight), ctx.needs_input_grad[2]),
        *ctx.constants,
    )
    return (
        for_input and for_input(grad_output, weight),
        for_weight and for_weight(grad_output, input),
        for_bias and for_bias(grad_output),
        *[None] * 7,
    )


@lru_cache(maxsize=1024)
def _ready_gradients(grad_output, input, weight, wants_bias, length, kernel_size, *parameters) -> tuple:
    """Functions for the wanted gradients of input, weight, bias. ``input`` and ``weight`` are None where unneeded."""
    return (
        weight and ready_input(grad_output, weight, length, *parameters),
        input and ready_weight(grad_output, input, kernel_size, *parameters),
        ready_bias(grad_output, parameters[-1]) if wants_bias else None,
    )


transforms.register(conv_transpose1d, backward, grad_ops.setup_context, grad_ops.jvp)
flops.register(conv_transpose1d, grad_ops.grad_input, grad_ops.grad_weight)
