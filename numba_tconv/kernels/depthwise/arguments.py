"""Named arguments."""

from typing import NamedTuple

from numba import types

from numba_tconv.kernels.common.arguments import Bias, Placed, PlacedSignal, Weights, arguments
from numba_tconv.runtime.kernel import flat


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
    tensors = PlacedSignal, Weights, Bias, Placed
    return (*(arguments(fields, data=flat(storage)) for fields in tensors), arguments(Sizes))
