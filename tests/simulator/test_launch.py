"""A kernel reads the fields of a named tuple by name."""

from typing import NamedTuple

import pytest
import torch
from numba import cuda, types

from numba_tconv.runtime.kernel import GIVEN, Kernel, alike, flat, named


class Signal(NamedTuple):
    data: object
    length: int
    steps: tuple


class Steps(NamedTuple):
    near: int
    far: int


def scale(signal, y, steps):
    i = cuda.grid(1)
    if i < signal.length:
        y[i] = steps.near * signal.data[i] + steps.far * signal.steps[1]


@pytest.mark.parametrize("prepared", [False, True], ids=["launched", "prepared"])
def test_fields(prepared):
    array = flat(types.float32)
    signal = named(Signal, data=array, length=types.int64, steps=types.UniTuple(types.int64, 2))
    steps = named(Steps, near=types.int64, far=types.int64)
    kernel = Kernel("scale", scale, (signal, array, steps), 32)
    x, y = torch.randn(5), torch.full((5,), torch.nan)
    if prepared:
        like = alike((5,), torch.float32)
        kernel.prepare(1, Signal(like, GIVEN, (0, 3)), like, Steps(2, GIVEN))(x, 5, y, -1)
    else:
        kernel.launch(1, Signal(x, 5, (0, 3)), y, Steps(2, -1))
    assert torch.equal(y, 2 * x - 3)
