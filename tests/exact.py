"""Sums that are exact in any order: small integers times powers of two at the ends of a dtype's range.

A result must be the oracle, rounded once; only a result becomes an infinity.
"""

import torch

from .parity import operands, scatter

# dtype; input and weight are multiples of these.
RANGES = {
    "float32, below its smallest": (torch.float32, 2.0**-149, 1.0),
    "float32, products below its smallest": (torch.float32, 2.0**-100, 2.0**-49),
    "float64, below its smallest": (torch.float64, 2.0**-1074, 1.0),
    "float16, below its smallest": (torch.float16, 2.0**-24, 1.0),
    "float16, above its largest": (torch.float16, 16.0, 32.0),
    "bfloat16, below its smallest": (torch.bfloat16, 2.0**-133, 1.0),
}


def exact_operands(problem, name):
    """Input, weight and bias, on the CPU, and the output."""
    dtype, x_unit, w_unit = RANGES[name]
    shapes = operands(problem, dtype)
    x, w, bias = (None if t is None else torch.randint(-9, 10, t.shape).double() for t in shapes)
    x, w, bias = x * x_unit, w * w_unit, None if bias is None else bias * x_unit * w_unit
    exact = scatter(x, w, bias, problem)
    smallest, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    assert ((exact != 0) & (exact.abs() < smallest)).any() or (exact.abs() > largest).any(), "what it is there for"
    return *(None if t is None else t.to(dtype) for t in (x, w, bias)), exact.to(dtype)
