"""Named arguments, with offsets in elements."""

from __future__ import annotations

from typing import NamedTuple

from numba import types

from numba_tconv.kernels.common.arguments import Bias, Weights, arguments
from numba_tconv.runtime.kernel import flat


class Input(NamedTuple):
    data: object
    offset: int  # from a multiple of 16 bytes
    stride_n: int
    stride_c: int
    stride_l: int


class Output(NamedTuple):
    """A contiguous tensor (N, C_out, L_out)."""

    data: object
    offset: int  # from a multiple of 16 bytes


class Sizes(NamedTuple):
    length: int
    out_length: int
    padding: int
    groups: int


class Window(NamedTuple):
    """Inputs to copy, with zeros outside [begin, end)."""

    source: int  # in x
    begin: int
    end: int
    aligned: bool  # to 16 bytes, in every channel


def shared_signature(storage: types.Type) -> tuple:
    stored = flat(storage)
    tensors = ((Input, stored), (Weights, stored), (Bias, stored), (Output, stored))
    return (*(arguments(fields, data=data) for fields, data in tensors), arguments(Sizes))
