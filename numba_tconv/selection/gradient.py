"""Rungs and functions for each gradient."""

from functools import lru_cache

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients import bias as bias_split
from numba_tconv.gradients.input import by_planes as grad_input_planes
from numba_tconv.gradients.input import depthwise as grad_input_depthwise
from numba_tconv.gradients.input import gather as grad_input_gather
from numba_tconv.gradients.input.tile import kernel as grad_input_tile
from numba_tconv.gradients.input.wgmma import kernel as grad_input_wgmma
from numba_tconv.gradients.rung import GradientRung
from numba_tconv.gradients.weight import depthwise as grad_weight_depthwise
from numba_tconv.gradients.weight.split import kernel as grad_weight_split
from numba_tconv.gradients.weight.wgmma import kernel as grad_weight_wgmma
from numba_tconv.runtime import device
from numba_tconv.runtime.device import Device
from numba_tconv.runtime.layout import Layout, layout_of
from numba_tconv.runtime.ready import Ready

# Simplest first
GRADIENTS: dict[str, GradientRung] = {
    rung.name: rung
    for rung in (
        grad_input_gather.InputGather(),
        grad_input_tile.InputTile(),
        grad_input_depthwise.InputDepthwise(),
        grad_input_planes.InputPlanes(),
        grad_input_wgmma.InputWarpgroup(),
        grad_weight_split.WeightSplit(),
        grad_weight_depthwise.WeightDepthwise(),
        grad_weight_wgmma.WeightWarpgroup(),
        bias_split.Bias(),
    )
}


# No operand is rounded.
EXACT = {torch.float64: "fp64", torch.float32: "ieee", torch.float16: "fp16", torch.bfloat16: "bf16"}


def grad_input(grad_output, weight, problem: Problem, variant: str | None = None, config=None, precision=None):
    """The gradient for the input, (N, C_in, L), contiguous, of grad_output's dtype.

    grad_output (N, C_out, L_out) and weight (C_in, C_out/groups, K) have any strides; shapes are not checked.
    ``variant``: a rung of GRADIENTS, None selects; ``precision`` None: EXACT's. Equal calls give equal bits. Raises
    ValueError for another gradient's variant, NotImplementedError if no rung allowed has the precision on the GPU.
    """
    return _compute("grad_input", variant, (grad_output, weight), problem, config, precision)


def grad_weight(grad_output, x, problem: Problem, variant: str | None = None, config=None, precision=None):
    """The gradient for the weight, (C_in, C_out/groups, K), as ``grad_input``.

    As in torch, infinities and NaN may reach taps that do not use them.
    """
    return _compute("grad_weight", variant, (grad_output, x), problem, config, precision)


def grad_bias(grad_output, problem: Problem, variant: str | None = None, config=None, precision=None):
    """The gradient for the bias, (C_out,), unrounded, as ``grad_input``."""
    return _compute("grad_bias", variant, (grad_output,), problem, config, precision)


def select(
    of: str, problem: Problem, dtype: torch.dtype, gpu: Device, variant: str | None = None, precision: str | None = None
) -> GradientRung:
    """The named rung, or the last that suits. Raises as ``grad_input``."""
    if variant is not None and variant not in GRADIENTS:
        raise ValueError(f"unknown variant {variant!r}: the gradients are {', '.join(GRADIENTS)}")
    rungs = [GRADIENTS[variant]] if variant else [rung for rung in GRADIENTS.values() if rung.of == of]
    if rungs[0].of != of:
        raise ValueError(f"{variant} computes {rungs[0].of}, not {of}")
    precision = precision or EXACT.get(dtype, "")
    refusals = {rung.name: rung.refusal(problem, dtype, precision, gpu) for rung in rungs}
    able = [rung for rung in rungs if not refusals[rung.name]]
    if not able:
        raise NotImplementedError("; ".join(f"{name} cannot do {problem}: {why}" for name, why in refusals.items()))
    return [*able[-1:], *(rung for rung in able if not rung.unsuited(problem, dtype, precision, gpu))][-1]


def _compute(of: str, variant, operands, problem: Problem, config, precision) -> torch.Tensor:
    return ready(of, problem, *map(layout_of, operands), variant=variant, config=config, precision=precision)(*operands)


@lru_cache(maxsize=1024)
def ready(of: str, problem: Problem, *operands: tuple, variant=None, config=None, precision=None) -> Ready:
    """The gradient's Ready for these layouts; zeros if grad_output is empty. Raises as ``grad_input``."""
    laid_out = [Layout(*operand) for operand in operands]
    grad_output = laid_out[0]
    dtype, index = grad_output.dtype, grad_output.index
    shape = problem.shape_of(of)
    if 0 in grad_output.shape:
        return Ready(shape, dtype, index, lambda *operands_result: operands_result[-1].zero_())
    precision = precision or EXACT.get(dtype, "")
    rung = select(of, problem, dtype, device.of(index), variant, precision)
    result = Layout.contiguous(shape, dtype, index)
    return Ready(shape, dtype, index, rung.prepare(*laid_out, result, problem, config=config, precision=precision))
