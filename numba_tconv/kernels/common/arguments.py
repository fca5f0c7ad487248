"""Named kernel arguments. Strides are in elements."""

from typing import NamedTuple

from numba import types

from numba_tconv.formula.problem import Problem
from numba_tconv.runtime.kernel import alike, named
from numba_tconv.runtime.layout import Layout


class Signal(NamedTuple):
    """A tensor (N, C, L)."""

    data: object
    stride_n: int
    stride_c: int
    stride_l: int


class PlacedSignal(NamedTuple):
    data: object
    offset: int  # elements past a 16-byte boundary
    stride_n: int
    stride_c: int
    stride_l: int


class Placed(NamedTuple):
    """A contiguous tensor."""

    data: object
    offset: int  # as PlacedSignal's


class Weights(NamedTuple):
    """Weights (C_in, C_out/groups, K)."""

    data: object
    stride_i: int
    stride_o: int
    stride_k: int


class Bias(NamedTuple):
    """A bias (C_out,); without one, any tensor of its type."""

    data: object
    exists: bool


class Layer(NamedTuple):
    """A problem's sizes and its taps' progression."""

    length: int
    in_per_group: int
    out_per_group: int
    taps: int
    stride: int
    padding: int
    dilation: int
    groups: int
    gap: int
    rows: int
    step: int
    inverse: int  # Taps.dilation_inverse
    out_length: int


def layer_of(problem: Problem) -> Layer:
    p, t = problem, problem.taps
    sizes = p.length, p.in_channels_per_group, p.out_channels_per_group, p.kernel_size
    progression = t.gap, t.rows, t.step, t.dilation_inverse
    return Layer(*sizes, p.stride, p.padding, p.dilation, p.groups, *progression, p.out_length)


def arguments(fields: type, **tensors: types.Type) -> types.BaseTuple:
    """Numba's type of ``fields``: ``tensors`` by name, the others int64."""
    return named(fields, **(dict.fromkeys(fields._fields, types.int64) | tensors))


SHORT = {"in_per_group": "in_channels_per_group", "out_per_group": "out_channels_per_group"}


def of_problem(fields: type, problem: Problem, **others: int) -> tuple:
    """A tuple ``fields`` from ``others``, else from the problem's sizes."""
    sizes = (others[name] if name in others else getattr(problem, SHORT.get(name, name)) for name in fields._fields)
    return fields(*sizes)


GRID_AXIS = 65_535  # most blocks along y or z


def over_planes(along_x: int, count: int) -> tuple[int, int, int]:
    """A grid of ``count`` rows of blocks, along y and z."""
    planes = -(-count // GRID_AXIS)
    return along_x, -(-count // planes), planes


def signal_like(x: Layout) -> Signal:
    return Signal(alike(x.shape, x.dtype, x.strides), *x.strides)


def placed_signal_like(x: Layout) -> PlacedSignal:
    return PlacedSignal(*placed_like(x), *x.strides)


def placed_like(x: Layout) -> Placed:
    return Placed(alike(x.shape, x.dtype, x.strides), x.offset % 16 // x.dtype.itemsize)


def weights_like(w: Layout) -> Weights:
    return Weights(alike(w.shape, w.dtype, w.strides), *w.strides)
