"""Hundreds of calls, most of them bad: a good call with one or two arguments replaced.

torch reports the first of two faults, so pairs tell whether ours are checked in the same order. Values are made anew
for each call and device.
"""

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import numba_tconv
from numba_tconv.formula.precision import PRECISIONS

# Shapes of input and weight, and other arguments.
GOOD = {
    "plain": ((2, 4, 7), (4, 6, 3), {}),
    "unbatched": ((4, 7), (4, 6, 3), {"stride": 2}),
    "every argument": (
        (2, 4, 7),
        (4, 3, 5),
        {"stride": 3, "padding": 2, "output_padding": 1, "groups": 2, "dilation": 2},
    ),
}
OUT_CHANNELS = 6  # of every good call


def _shaped(*shape):
    return lambda tensor: torch.randn(shape, device=tensor.device).to(tensor.dtype)


def _of(dtype):
    return lambda tensor: tensor.to(dtype)


def _instead(value):
    return lambda tensor: value


_TENSORS = {
    **{str(dtype): _of(dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)},
    **{str(dtype): _of(dtype) for dtype in (torch.bool, torch.complex64, torch.float8_e4m3fn)},
    "requires grad": lambda tensor: tensor.requires_grad_(),
    "a parameter": torch.nn.Parameter,
    "strided": lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2],
    # Sparse tensors cannot be without memory.
    "COO": lambda tensor: tensor if tensor.is_meta else tensor.to_sparse(),
    "CSR": lambda tensor: tensor if tensor.is_meta or tensor.dim() < 2 else tensor.to_sparse_csr(),
    "meta": lambda tensor: tensor.to("meta"),
    "None": _instead(None),
    "a string": _instead("same"),
    "a number": _instead(1.5),
    "nested lists": _instead([[[1.0, 2.0]]]),
    "an array": lambda tensor: np.ones(tensor.shape),
}
_INTEGERS = {
    **{repr(value): value for value in (0, 1, 2, 3, -1, -7, 2**31, -(2**63), 2**63, -(2**70), 2**40, 2**62)},
    **{repr(value): value for value in (None, True, 1.0, 1j, "1", "same", b"1", (), (1,), [2], (3, 1), [1, 1, 1])},
    **{repr(value): value for value in ((-1,), (0,), (1.0,), ("1",), (None,), ((1,),), (2**70,), {1}, {1: 1})},
    **{repr(value): value for value in (np.int64(2), np.uint8(1), np.float32(1), np.bool_(True), np.array([1, 2]))},
    **{repr(value): value for value in ((True,), ([1],), (1, 1.0), (np.int64(1),), range(1, 2), torch.Size([1]), ...)},
    "a tensor": torch.tensor(2),
    "a tensor of one": torch.tensor([1]),
    "a tensor of a float": torch.tensor(1.0),
    "a tuple with a tensor": (torch.tensor(2),),
    "a tuple with a tensor of a float": (torch.tensor(1.0),),
}
REPLACEMENTS = {
    "input": {
        **{str(shape): _shaped(*shape) for shape in ((2, 4, 1), (2, 4, 0), (0, 4, 7), (0, 4, 0), (2, 0, 7), (4, 0))},
        **{str(shape): _shaped(*shape) for shape in ((7,), (), (2, 4, 7, 1), (2, 3, 7), (3, 7), (0, 7), (1, 4, 2))},
        **_TENSORS,
    },
    "weight": {
        **{str(shape): _shaped(*shape) for shape in ((4, 6), (6,), (), (4, 6, 3, 1), (0, 6, 3), (4, 0, 3), (4, 6, 0))},
        **{str(shape): _shaped(*shape) for shape in ((5, 6, 3), (6, 4, 3), (4, 3, 1), (4, 6, 1), (3, 6, 3))},
        **_TENSORS,
    },
    "bias": {
        "six": lambda tensor: tensor,
        **{str(shape): _shaped(*shape) for shape in ((), (0,), (1,), (5,), (12,), (6, 1), (1, 6))},
        **_TENSORS,
    },
    **{
        name: {label: _instead(value) for label, value in _INTEGERS.items()}
        for name in ("stride", "output_padding", "groups", "dilation")
    },
    # torch refuses words and pairs.
    "padding": {
        label: _instead(value) for label, value in _INTEGERS.items() if label not in ("'same'", "'1'", "(3, 1)")
    },
}
FEW = 14  # calls for each pair of arguments and good call
TORCHS = torch.conv_transpose1d
PAIRS = list(itertools.combinations_with_replacement(REPLACEMENTS, 2))
pairs_of_arguments = pytest.mark.parametrize("pair", PAIRS, ids=" ".join)


@dataclass(frozen=True)
class Call:
    """A call of GOOD; ``replaced`` holds names of arguments and of their replacements."""

    good: str
    replaced: tuple

    def __str__(self):
        return f"{self.good}: {', '.join(f'{name} = {label}' for name, label in self.replaced)}"

    def arguments(self, device="cpu", dtype=torch.float32) -> dict:
        x_shape, w_shape, rest = GOOD[self.good]
        made = {
            "input": torch.randn(x_shape, device=device, dtype=dtype),
            "weight": torch.randn(w_shape, device=device, dtype=dtype),
        }
        made |= rest
        for name, label in self.replaced:
            before = made.get(name, torch.randn(OUT_CHANNELS, device=device, dtype=dtype))
            made[name] = REPLACEMENTS[name][label](before)
        return made


def calls(pair) -> list[Call]:
    """Drawn calls with two arguments replaced; if both are the same, calls with each of its values."""
    first, second = pair
    if first == second:
        return [Call(good, ((first, label),)) for good in GOOD for label in REPLACEMENTS[first]]
    drawn = random.Random(f"{first} {second}")
    return [
        Call(good, tuple((name, drawn.choice(list(REPLACEMENTS[name]))) for name in pair))
        for good in GOOD
        for _ in range(FEW)
    ]


def tensors_of(arguments):
    return [value for name in ("input", "weight", "bias") if isinstance(value := arguments.get(name), torch.Tensor)]


def is_left_to_torch(arguments) -> bool:
    """Whether torch's own function gets a GPU's call, and so refuses it."""
    tensors = tensors_of(arguments)
    x, weight = arguments.get("input"), arguments.get("weight")
    return (
        any(tensor.layout != torch.strided for tensor in tensors)
        or (isinstance(x, torch.Tensor) and (x.dtype not in PRECISIONS or (x.dim() == 3 and x.shape[0] == 0)))
        or (isinstance(weight, torch.Tensor) and weight.dim() == 3 and weight.shape[1] == 0)
    )


def is_huge(arguments) -> bool:
    """Whether the call may fail for lack of memory or by a backend's integer overflow."""
    return any(isinstance(value, int) and 2**31 <= value < 2**63 for value in arguments.values())


def outcome(function, arguments):
    try:
        return function(**arguments)
    except Exception as error:  # any: types are compared
        return error


def disagreement(ours, theirs) -> str | None:
    """The difference between two outcomes, or None.

    An output without samples equals a refusal, because torch's backends differ there.
    """
    if not isinstance(theirs, torch.Tensor):
        if "Output size is too small" in str(theirs) and isinstance(ours, torch.Tensor) and not ours.numel():
            return None
        return None if type(ours) is type(theirs) else f"torch: {theirs!r}, ours: {ours!r}"
    if not isinstance(ours, torch.Tensor):
        return f"torch accepts it, ours: {ours!r}"
    for name in ("shape", "dtype", "device", "layout", "requires_grad"):
        if getattr(ours, name) != getattr(theirs, name):
            return f"{name} {getattr(ours, name)}, torch: {getattr(theirs, name)}"
    return None


def disagreements(pair, device="cpu", skip=lambda arguments: False, more=lambda arguments, ours, theirs: None) -> dict:
    """The calls with a pair of arguments replaced in which ours and torch differ, each with the difference.

    ``skip`` leaves calls out; ``more`` may find further faults of an outcome.
    """
    found = {}
    for call in calls(pair):
        if skip(call.arguments(device)):
            continue
        theirs = outcome(TORCHS, call.arguments(device))
        arguments = call.arguments(device)
        ours = outcome(numba_tconv.conv_transpose1d, arguments)
        if what := disagreement(ours, theirs) or more(arguments, ours, theirs):
            found[str(call)] = what
    return found
