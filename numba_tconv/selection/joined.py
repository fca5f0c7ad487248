"""Short signals of a batch, joined end to end into one signal with zeros between them.

Alone, short signals share windows, filled row by row, or leave tiles half empty."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from numba_tconv.formula.problem import COPY_BANDWIDTH, Problem
from numba_tconv.kernels.common.rows import copying
from numba_tconv.kernels.common.tensor_map import ALIGNMENT
from numba_tconv.runtime.device import Device
from numba_tconv.runtime.layout import Layout
from numba_tconv.runtime.ready import Ready

from .forward import arithmetic, select

LAUNCHES = 5e-3  # milliseconds of the copies' launches
COPIED = 0.7 * COPY_BANDWIDTH / 1e3  # bytes a millisecond
MARGIN = 1.1  # least gain by the models
MOST_BYTES = 1 << 30  # of joined x and y


class Joined(NamedTuple):
    """``problem``: of the one signal, with ``stride`` outputs a position; ``apart``: positions from start to start."""

    problem: Problem
    apart: int
    copies_ms: float


@lru_cache(maxsize=1024)
def joined(problem: Problem, dtype: torch.dtype, precision: str, device: Device) -> Joined | None:
    """The joined signal; None if each signal is computed by itself. ``precision``: as for ``arithmetic``.

    Zeros between signals keep their outputs apart.
    """
    p = problem
    if p.batch < 2 or not p.out_length or p.dilation > 1 or p.kernel_size < p.stride:
        return None
    own = arithmetic(p, dtype, "", precision, device)
    rung = select(p, dtype, own, device)
    config = rung and rung.config_on(device, p, dtype, own)
    if not rung or not (slowdown := rung.slowdown(p, config)):
        return None
    vector = ALIGNMENT // dtype.itemsize
    reached = max(replace(p, padding=0, output_padding=0).out_length, p.padding + p.out_length)
    apart = _up(_up(reached, p.stride), vector) * vector
    length = p.batch * apart
    one = replace(p, batch=1, length=length, padding=0, output_padding=p.stride - p.kernel_size)
    if length * (p.in_channels + p.out_channels * p.stride) * dtype.itemsize > MOST_BYTES:
        return None
    # x and y, once more.
    elements = p.batch * (p.in_channels * p.length + p.out_channels * p.out_length)
    copies = LAUNCHES + 2 * elements * dtype.itemsize / COPIED
    alone = slowdown * rung.predicted_ms(p, config, device)
    together = rung.predicted_ms(one, rung.config_on(device, one, dtype, own), device)
    return Joined(one, apart, copies) if MARGIN * (together + copies) < alone else None


def _up(number: int, size: int) -> int:
    return -(-number // size)


def forward(joint: Joined, p: Problem, x: Layout, compute: Ready) -> Callable[..., None]:
    """``fill`` (x, weight, bias, y) by ``compute``, the joined problem's."""
    join, part = _join(joint, x), _part(joint.apart * p.stride, p.padding)

    def fill(x, weight, bias, y):
        part(compute(join(x), weight, bias), y)

    return fill


def gradient(
    of: str, joint: Joined, p: Problem, grad_output: Layout, operand: Layout, ready: Callable[..., Ready | None]
) -> Ready | None:
    """The gradient "grad_input" or "grad_weight" by ``ready(of, problem, *layouts)``'s of the joined problem.

    ``operand``: weight or x. None where ``ready`` gives none."""
    dtype, index = grad_output.dtype, grad_output.index
    joined_outputs = Layout.contiguous((1, p.out_channels, joint.problem.out_length), dtype, index)
    joined_x = Layout.contiguous((1, p.in_channels, joint.problem.length), dtype, index)
    compute = ready(of, joint.problem, joined_outputs, operand if of == "grad_input" else joined_x)
    if compute is None:
        return None
    join_outputs = _join_outputs(joint, p, grad_output)
    if of == "grad_input":
        part = _part(joint.apart)

        def fill(grad_output, weight, result):
            part(compute(join_outputs(grad_output), weight), result)

        return Ready((p.batch, p.in_channels, p.length), dtype, index, fill)
    join = _join(joint, operand)

    def fill_weight(grad_output, x, result):
        compute.fill(join_outputs(grad_output), join(x), result)

    return Ready((p.in_channels, p.out_channels_per_group, p.kernel_size), dtype, index, fill_weight)


def _join(joint: Joined, x: Layout) -> Callable[[torch.Tensor], torch.Tensor]:
    return copying(_channels_first(x), joint.apart, result=(1, x.shape[1], joint.problem.length))


def _join_outputs(joint: Joined, p: Problem, y: Layout) -> Callable[[torch.Tensor], torch.Tensor]:
    shape = 1, p.out_channels, joint.problem.out_length
    return copying(_channels_first(y), joint.apart * p.stride, -p.padding, shape)


def _part(apart: int, first: int = 0) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A copy of each signal's elements from ``first`` on; signals begin ``apart`` elements apart."""

    def part(one, result):
        result.copy_(one.as_strided(result.shape, (apart, one.stride(1), 1), first))

    return part


def _channels_first(layout: Layout) -> Layout:
    def swapped(sizes):
        return sizes[1], sizes[0], sizes[2]

    return layout._replace(shape=swapped(layout.shape), strides=swapped(layout.strides))
