"""Each torch dtype's storage and accumulator."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from numba import float32, float64, types, uint16

from numba_tconv.ptx import bf16_to_f32, device_function, f32_to_bf16


@dataclass(frozen=True)
class Element:
    """``storage`` in memory, ``accumulator`` for sums; ``load`` and ``store`` convert."""

    name: str
    storage: types.Type
    accumulator: types.Type
    load: Callable[[Any], Any]
    store: Callable[[Any], Any]


@device_function
def _same(value):
    return value


@device_function
def _widen(value):
    return float32(value)


@device_function
def _narrow(value):
    return types.float16(value)


# Numba has no bfloat16: arrays hold bits.
@device_function
def _from_bits(bits):
    return bf16_to_f32(bits)


@device_function
def _to_bits(value):
    return f32_to_bf16(value)


ELEMENTS = {
    torch.float64: Element("float64", float64, float64, _same, _same),
    torch.float32: Element("float32", float32, float32, _same, _same),
    torch.float16: Element("float16", types.float16, float32, _widen, _narrow),
    torch.bfloat16: Element("bfloat16", uint16, float32, _from_bits, _to_bits),
}
