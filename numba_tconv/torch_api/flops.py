"""The operators' FLOPs for torch.utils.flop_counter."""

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from numba_tconv.formula.alias_free import alias_free
from numba_tconv.formula.problem import Parameters


def register(conv_transpose1d: torch._ops.OpOverload, grad_input, grad_weight) -> None:

    @register_flop_formula(conv_transpose1d.overloadpacket)
    def _forward(input, weight, bias, *others, out_shape):
        return _count("convolution", [input, weight, bias], Parameters(*others[:-2]), out_shape)

    @register_flop_formula(grad_input.overloadpacket)
    def _grad_input(grad_output, weight, length, *others, out_shape):
        parameters = Parameters(*others[:-1])
        operands = [grad_output, out_shape, weight, None]
        return _count("convolution_backward", operands, parameters, [out_shape, None, None], [True, False, False])

    @register_flop_formula(grad_weight.overloadpacket)
    def _grad_weight(grad_output, input, kernel_size, *others, out_shape):
        parameters = Parameters(*others[:-1])
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


def _count(name: str, operands: list, p: Parameters, result, *wanted: list[bool]) -> int:
    lists = [p.stride], [p.padding], [p.dilation], True, [p.output_padding]
    return flop_registry[getattr(torch.ops.aten, name)](*operands, *lists, p.groups, *wanted, out_val=result)
