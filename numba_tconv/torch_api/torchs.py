"""torch's own operators, for every ``padding`` and ``output_padding`` of a Problem.

torch crops both ends alike, less ``output_padding``; for other crops, outputs are dropped.
"""

import torch

from numba_tconv.formula.padding import cover_of
from numba_tconv.formula.problem import Parameters


def forward(input, weight, bias, stride, padding, output_padding, groups, dilation) -> torch.Tensor:
    """The output, a view where outputs are dropped."""
    cover = cover_of(padding, output_padding, stride, dilation)
    sizes = stride, cover.padding, cover.output_padding, groups, dilation
    return dropped(torch.conv_transpose1d(input, weight, bias, *sizes), cover)


def without_autocast(tensor: torch.Tensor) -> torch.autocast:
    return torch.autocast("cuda" if tensor.is_cuda else "cpu", enabled=False)


def without_views(input, *others) -> torch.Tensor:
    with without_autocast(input):
        output = forward(input, *others)
    return output.clone(memory_format=torch.contiguous_format) if output._is_view() else output.contiguous()


def dropped(output: torch.Tensor, cover) -> torch.Tensor:
    return output[..., cover.left : output.shape[-1] - cover.right] if cover.left or cover.right else output


def gradients(grad_output, input, weight, bias_sizes, parameters: Parameters, wanted) -> tuple:
    """The gradients for input, weight and bias; other arguments are ``aten.convolution_backward``'s."""
    p = parameters
    cover = cover_of(p.padding, p.output_padding, p.stride, p.dilation)
    if cover.left or cover.right:
        grad_output = torch.nn.functional.pad(grad_output, (cover.left, cover.right))
    lists = [p.stride], [cover.padding], [p.dilation], True, [cover.output_padding]
    return torch.ops.aten.convolution_backward(grad_output, input, weight, bias_sizes, *lists, p.groups, wanted)
