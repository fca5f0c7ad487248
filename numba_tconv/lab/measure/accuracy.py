"""Errors against float64, and the rule for a right result."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.selection.directions import FORWARD

from .directions import Operands, by_torch

ORACLE_ELEMENTS = 1 << 27  # 1 GiB
NO_TF32 = 1e-5  # relative norm of results not rounded to TF32

# Bounds of a rounding error's standard deviation, relative to the product: b bits are off by up to 2**-b. Split
# operands have 22 bits, without the product of low halves.
OPERANDS_SPREAD = {"tf32": 2**-11 * math.sqrt(2 / 3), "tf32x3": 2**-22 * math.sqrt(2 / 3 + 1 / 9)}
MOST = math.sqrt(6)  # deviations of one product
FEW = 64  # fewer may all be off by more than a deviation
DEVIATIONS = 6
FEW_TERMS = 64  # products, added serially, that may nearly cancel


@dataclass(frozen=True)
class Error:
    """Distance from float64: relative ``norm``, ``largest`` element error over the largest element."""

    norm: float
    largest: float

    def __str__(self) -> str:
        return f"error norm {self.norm:.2e}, largest {self.largest:.2e}"

    def within(self, of_torch: "Error", dtype: torch.dtype, precision: str, terms: int) -> bool:
        """Whether both measures are at most twice torch's in the same precision.

        The limit is at least the dtype's spacing; in float64, whose reference is rounded too, times the root of
        ``terms``, the longest sum's products. Where cuDNN did not use an allowed TF32, it is TF32_ERROR.
        """
        if precision == "tf32" and of_torch.norm < NO_TF32:
            return self.at_most(TF32_ERROR)
        spacing = torch.finfo(dtype).eps
        if dtype == torch.float64:
            spacing *= math.sqrt(terms)
        return self.at_most(Error(max(2 * of_torch.norm, spacing), max(2 * of_torch.largest, spacing)))

    def at_most(self, limit: "Error") -> bool:
        """Whether both measures are within ``limit``; False for NaN."""
        return self.norm <= limit.norm and self.largest <= limit.largest


TF32_ERROR = Error(4e-4, 6e-4)


def right(result: str, error: Error, of_torch: Error, operands: Operands, precision: str, p: Problem) -> bool:
    """Whether the error is within torch's, or within ``rounding`` for float32 sums of at most FEW_TERMS products."""
    if result == "grad_bias":
        precision = "ieee"
    dtype = operands.x.dtype
    if error.within(of_torch, dtype, precision, p.terms(result)):
        return True
    few = dtype == torch.float32 and p.terms(result) <= FEW_TERMS
    return few and error.at_most(rounding(result, operands, p, precision))


def rounding(result: str, operands: Operands, p: Problem, precision: str) -> Error:
    """The relative error of float32 arithmetic in ``precision``, if rounding errors are independent."""
    terms = p.terms(result)
    spread = math.hypot(OPERANDS_SPREAD.get(precision, 0), 2**-24 * math.sqrt(min(terms, FEW_TERMS) / 6))
    products = operands._replace(bias=None)
    fewest = min(math.prod(p.shape_of(result)), *(t.numel() for t in products.of(result) if t is not None))
    square = square_largest = truth_square = truth_largest = 0
    both = (in_float64(result, operands, p), in_float64(result, products, p, torch.square))
    for (_, truth), (_, squares) in zip(*both, strict=True):
        truth_square, truth_largest = truth_square + truth.square().sum(), max(truth_largest, _peak(truth))
        square, square_largest = square + squares.sum(), max(square_largest, _peak(squares))
    norm = spread * max(1, min(math.sqrt(FEW / max(fewest, 1)), MOST)) * math.sqrt(square)
    largest = spread * min(MOST * math.sqrt(terms), DEVIATIONS) * math.sqrt(square_largest)
    return Error(_relative(norm, math.sqrt(truth_square)), _relative(largest, truth_largest))


def errors(outputs: dict[str, torch.Tensor], operands: Operands, p: Problem, result: str = FORWARD) -> dict[str, Error]:
    """Errors of ``outputs``, all one result, against torch's float64 without cuDNN."""
    zero = torch.zeros((), dtype=torch.float64, device=operands.x.device)
    squares, largest = dict.fromkeys(outputs, zero), dict.fromkeys(outputs, zero)
    truth_square = truth_largest = zero
    for some, truth in in_float64(result, operands, p):
        truth_square, truth_largest = truth_square + truth.square().sum(), torch.maximum(truth_largest, _peak(truth))
        for name, y in outputs.items():
            difference = y[some].double() - truth
            squares[name] = squares[name] + difference.square().sum()
            largest[name] = torch.maximum(largest[name], _peak(difference))

    return {
        name: Error(_relative(squares[name].sqrt(), truth_square.sqrt()), _relative(largest[name], truth_largest))
        for name in outputs
    }


def _relative(value, to) -> float:
    return float(value / to if to else value)


def in_float64(
    result: str, operands: Operands, p: Problem, change: Callable = lambda tensor: tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the float64 result, of operands under ``change``, in slices of the first dimension."""
    x, grad_output = operands.x, operands.grad_output

    def changed(tensor):
        return None if tensor is None else change(tensor.double())

    weight, bias = changed(operands.weight), changed(operands.bias)
    step = max(1, ORACLE_ELEMENTS // max(1, p.out_channels * p.out_length, p.in_channels * p.length))
    total = None
    for first in range(0, x.shape[0], step):
        some = slice(first, first + step)
        of_output = None if grad_output is None else grad_output[some]
        with torch.backends.cudnn.flags(enabled=False):
            piece = by_torch(result, Operands(changed(x[some]), weight, bias, changed(of_output)), p)
        if result in (FORWARD, "grad_input"):
            yield some, piece
        else:
            total = piece if total is None else total + piece
    if total is not None:
        yield slice(None), total


def _peak(values: torch.Tensor) -> torch.Tensor:
    return values.abs().amax() if values.numel() else values.sum()
