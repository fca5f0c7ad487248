"""Transposed convolution by conv1d, as an expert writes it.

conv1d's output channels are the phases, then shuffled and cropped.
"""

import torch
from torch.nn.functional import conv1d, pad

from numba_tconv.formula.problem import Problem


def applies(problem: Problem) -> bool:
    whole_phases = problem.kernel_size % problem.stride == 0 and problem.dilation == 1
    return problem.stride == 1 or whole_phases


def pack(weight: torch.Tensor, problem: Problem) -> torch.Tensor:
    """conv1d's weight, (C_out*stride, C_in/groups, K/stride), from (C_in, C_out/groups, K)."""
    stride, groups, taps = problem.stride, problem.groups, problem.kernel_size // problem.stride
    phases = weight.reshape(groups, problem.in_channels_per_group, problem.out_channels_per_group, taps, stride)
    stacked = phases.flip(3).permute(0, 2, 4, 1, 3)  # group, output channel, phase, input channel, tap
    return stacked.reshape(problem.out_channels * stride, problem.in_channels_per_group, taps)


def pack_bias(bias: torch.Tensor | None, problem: Problem) -> torch.Tensor | None:
    """conv1d's bias, (C_out*stride,)."""
    return None if bias is None else bias.repeat_interleave(problem.stride)


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem) -> torch.Tensor:
    """(N, C_out, L_out) from x (N, C_in, L); a view where stride > 1."""
    reach = problem.dilation * (problem.kernel_size // problem.stride - 1)
    if problem.stride == 1:
        before, after = reach - problem.padding, reach - problem.padding + problem.output_padding
    else:
        before, after = reach, reach + (problem.output_padding > problem.padding)
    if before == after and before >= 0:
        y = conv1d(x, weight, bias, padding=before, dilation=problem.dilation, groups=problem.groups)
    else:
        y = conv1d(pad(x, (before, after)), weight, bias, dilation=problem.dilation, groups=problem.groups)
    if problem.stride == 1:
        return y
    shuffled = y.unflatten(1, (problem.out_channels, problem.stride)).transpose(2, 3).flatten(2)
    return shuffled[..., problem.padding : problem.padding + problem.out_length]
