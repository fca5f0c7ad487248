"""Arguments of the gradients' kernels that host and device share by name. Strides are in elements."""

from __future__ import annotations

from typing import NamedTuple

from numba import types

from numba_tconv.formula.problem import Problem
from numba_tconv.runtime.kernel import flat, named


class Signal(NamedTuple):
    """A tensor (N, C, L)."""

    data: object
    stride_n: int
    stride_c: int
    stride_l: int


class PlacedSignal(NamedTuple):
    """A tensor (N, C, L) that is read in vectors of 16 bytes."""

    data: object
    offset: int  # elements from a multiple of 16 bytes to the first
    stride_n: int
    stride_c: int
    stride_l: int


class Weight(NamedTuple):
    """A tensor (C_in, C_out/groups, K)."""

    data: object
    stride_ci: int
    stride_co: int
    stride_k: int


def tensor(fields: type, storage: types.Type) -> types.BaseTuple:
    """Type of the NamedTuple ``fields`` of a flat tensor, ``data``, and integers."""
    return named(fields, data=flat(storage), **dict.fromkeys(fields._fields[1:], types.int64))


def integers(fields: type) -> types.BaseTuple:
    """Type of the NamedTuple ``fields`` of integers."""
    return named(fields, **dict.fromkeys(fields._fields, types.int64))


def of_problem(fields: type, problem: Problem, **others: int) -> tuple:
    """The NamedTuple ``fields`` of ``others`` and, by name, of the problem's sizes."""
    return fields(*(others[name] if name in others else getattr(problem, name) for name in fields._fields))
