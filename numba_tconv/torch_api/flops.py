"""The operators' FLOPs for torch.utils.flop_counter."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from numba_tconv.formula.alias_free import alias_free


def register(conv_transpose1d: torch._ops.OpOverload, grad_input, grad_weight) -> None:

    @register_flop_formula(conv_transpose1d.overloadpacket)
    def _forward(input, weight, bias, *parameters, out_shape):
        return _count("convolution", [input, weight, bias], parameters, out_shape)

    @register_flop_formula(grad_input.overloadpacket)
    def _grad_input(grad_output, weight, length, *parameters, out_shape):
        operands = [grad_output, out_shape, weight, None]
        return _count("convolution_backward", operands, parameters, [out_shape, None, None], [True, False, False])

    @register_flop_formula(grad_weight.overloadpacket)
    def _grad_weight(grad_output, input, kernel_size, *parameters, out_shape):
        operands = [grad_output, input, out_shape, None]
        return _count("convolution_backward", operands, parameters, [None, out_shape, None], [False, True, False])


def register_activation(activation: torch._ops.OpOverload, gradients: torch._ops.OpOverload) -> None:
    """The gradients compute the up-samples again."""

    @register_flop_formula(activation.overloadpacket)
    def _forward(x, up_filter, down_filter, alpha, beta, up_ratio, down_ratio, *others, out_shape):
        return alias_free(x, *up_filter, *down_filter, up_ratio, down_ratio).flops

    @register_flop_formula(gradients.overloadpacket)
    def _gradients(grad_output, x, up_filter, down_filter, alpha, beta, up_ratio, down_ratio, *others, out_shape):
        sizes = alias_free(x, *up_filter, *down_filter, up_ratio, down_ratio)
        return sizes.flops + 2 * sizes.rows * sizes.length * sizes.up_taps


def _count(name: str, operands: list, parameters: tuple, result, *wanted: list[bool]) -> int:
    stride, padding, output_padding, groups, dilation, *_ = parameters
    lists = [stride], [padding], [dilation], True, [output_padding]
    return flop_registry[getattr(torch.ops.aten, name)](*operands, *lists, groups, *wanted, out_val=result)
