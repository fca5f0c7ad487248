"""How far results are from float64, and what is right: at most twice torch's own error in the same precision."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .directions import FORWARD, Operands, by_torch
from .problem import Problem

ORACLE_ELEMENTS = 1 << 27  # float64 elements of the output or the input held at once, 1 GiB
NO_TF32 = 1e-5  # relative norms: below, torch has not computed in TF32, which rounds operands to 11 bits


@dataclass(frozen=True)
class Error:
    """How far a result is from the float64 result: the relative norm, and the largest element error, which is
    relative to the largest element of the result."""

    norm: float
    largest: float

    def __str__(self) -> str:
        return f"error norm {self.norm:.2e}, largest {self.largest:.2e}"

    def within(self, of_torch: Error, dtype: torch.dtype, precision: str, terms: int) -> bool:
        """At most twice torch's own error in the same precision, in both measures.

        TF32 is only a permission, and cuDNN does not always use it (for groups of few channels, or with weights of
        many megabytes): its error is then that of float32, which says nothing about TF32. In its place stands what
        rounding both operands to 11 bits costs, 2.9e-4 of the norm for random data, with a margin.

        Nothing is asked to be closer than the spacing of the dtype's numbers: torch's error can be next to nothing by
        luck where few products are summed. In float64 the result that both are held against is itself rounded, at
        random in each of its sums, the longest of which has ``terms`` products.
        """
        if precision == "tf32" and of_torch.norm < NO_TF32:
            return self.norm <= TF32_ERROR.norm and self.largest <= TF32_ERROR.largest
        spacing = torch.finfo(dtype).eps
        if dtype == torch.float64:
            spacing *= math.sqrt(terms)
        return self.norm <= max(2 * of_torch.norm, spacing) and self.largest <= max(2 * of_torch.largest, spacing)


TF32_ERROR = Error(4e-4, 6e-4)


def right(result: str, error: Error, of_torch: Error, dtype: torch.dtype, precision: str, p: Problem) -> bool:
    """Whether a result of the problem is as close to float64 as it has to be, beside torch's own in that precision."""
    if result == "grad_bias":
        precision = "ieee"  # it has no products, so there is nothing that TF32 rounds
    return error.within(of_torch, dtype, precision, p.terms(result))


def errors(outputs: dict[str, torch.Tensor], operands: Operands, p: Problem, result: str = FORWARD) -> dict[str, Error]:
    """The error of each of ``outputs``, which all are that result of the problem, against torch in float64.

    Every element counts; NaN stays NaN. The float64 result comes from torch without cuDNN, a few samples at a time.
    """
    zero = torch.zeros((), dtype=torch.float64, device=operands.x.device)
    squares, largest = dict.fromkeys(outputs, zero), dict.fromkeys(outputs, zero)
    truth_square = truth_largest = zero
    for some, truth in _in_float64(result, operands, p):
        truth_square, truth_largest = truth_square + truth.square().sum(), torch.maximum(truth_largest, _peak(truth))
        for name, y in outputs.items():
            difference = y[some].double() - truth
            squares[name] = squares[name] + difference.square().sum()
            largest[name] = torch.maximum(largest[name], _peak(difference))

    def relative(value, to):
        return (value / to).item() if to else value.item()

    return {
        name: Error(relative(squares[name].sqrt(), truth_square.sqrt()), relative(largest[name], truth_largest))
        for name in outputs
    }


def _in_float64(result: str, operands: Operands, p: Problem) -> Iterator[tuple[slice, torch.Tensor]]:
    """The float64 result in pieces, each with its place along the first dimension.

    Output and grad_input come a few samples at a time. The gradients for weight and bias are sums over the samples:
    they come whole, after the last.
    """
    x, weight, bias, grad_output = operands
    weight, bias = weight.double(), None if bias is None else bias.double()
    step = max(1, ORACLE_ELEMENTS // max(1, p.out_channels * p.out_length, p.in_channels * p.length))
    total = None
    for first in range(0, x.shape[0], step):
        some = slice(first, first + step)
        of_output = None if grad_output is None else grad_output[some].double()
        with _without_cudnn() if x.is_cuda else contextlib.nullcontext():
            piece = by_torch(result, Operands(x[some].double(), weight, bias, of_output), p)
        if result in (FORWARD, "grad_input"):
            yield some, piece
        else:
            total = piece if total is None else total + piece
    if total is not None:
        yield slice(None), total


def _peak(values: torch.Tensor) -> torch.Tensor:
    return values.abs().amax() if values.numel() else values.sum()


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    before, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before
