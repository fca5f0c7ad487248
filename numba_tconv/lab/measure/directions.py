"""Each direction's operands, costs and implementations."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from numba_tconv.formula.precision import TF32_ALLOWED
from numba_tconv.formula.problem import Problem
from numba_tconv.selection.directions import FORWARD, OF_GRADIENTS, STEP, results_of
from numba_tconv.torch_api import functional, torchs
from numba_tconv.torch_api import gradient_operators as grad_ops


class Operands(NamedTuple):
    x: torch.Tensor  # (N, C_in, L)
    weight: torch.Tensor  # (C_in, C_out/groups, K)
    bias: torch.Tensor | None  # (C_out,)
    grad_output: torch.Tensor | None = None  # (N, C_out, L_out); None: forward only

    def of(self, result: str) -> tuple:
        """Operands of a result, in the rungs' order."""
        g = self.grad_output
        return {
            FORWARD: (self.x, self.weight, self.bias),
            "grad_input": (g, self.weight),
            "grad_weight": (g, self.x),
            "grad_bias": (g,),
        }[result]


def costs_of(direction: str, p: Problem) -> list[Problem]:
    """Forward passes that together cost what the direction does."""
    without_bias = replace(p, bias=False)
    return {FORWARD: [p], STEP: [p, without_bias, without_bias]}.get(direction, [without_bias])


def torch_forward(x, weight, bias, p: Problem) -> torch.Tensor:
    return torchs.forward(x, weight, bias, *p.parameters)


def by_torch(result: str, operands: Operands, p: Problem) -> torch.Tensor:
    x, weight = operands.x, operands.weight
    if result == FORWARD:
        return torch_forward(x, weight, operands.bias, p)
    wanted = [result == name for name in OF_GRADIENTS]
    gradients = torchs.gradients(operands.grad_output, x, weight, [p.out_channels], p.parameters, wanted)
    return gradients[wanted.index(True)]


def our_forward(x, weight, bias, p: Problem, precision: str) -> torch.Tensor:
    named = None if precision == TF32_ALLOWED else precision
    pair = p.padding, p.padding - p.output_padding
    padding, output_padding = (p.padding, p.output_padding) if p.has_torchs_padding else (pair, 0)
    return functional.conv_transpose1d(
        *(x, weight, bias, p.stride, padding, output_padding, p.groups, p.dilation), precision=named
    )


def by_selection(result: str, operands: Operands, p: Problem, precision: str) -> torch.Tensor:
    if result == FORWARD:
        return our_forward(*operands.of(result), p, precision)
    if result == "grad_bias":
        return grad_ops.grad_bias(operands.grad_output, precision)
    size, operator = (
        (p.length, grad_ops.grad_input) if result == "grad_input" else (p.kernel_size, grad_ops.grad_weight)
    )
    return operator(*operands.of(result), size, *p.parameters, precision)


def by_autograd(forward: Callable, operands: Operands, p: Problem) -> dict[str, torch.Tensor]:
    inputs = [tensor if tensor is None else tensor.detach().requires_grad_() for tensor in operands[:3]]
    with torch.enable_grad():
        y = forward(*inputs)
        wanted = [tensor for tensor in inputs if tensor is not None]
        gradients = torch.autograd.grad(y, wanted, operands.grad_output)
    return dict(zip(results_of(STEP, p), (y.detach(), *gradients), strict=True))
