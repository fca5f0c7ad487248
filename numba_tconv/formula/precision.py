"""Precisions of each dtype by name, and what tensor cores multiply for each."""

from __future__ import annotations

import torch

# The values of `precision` by dtype; the first is the default, unless torch allows TF32.
PRECISIONS = {
    torch.float64: ("fp64",),
    torch.float32: ("ieee", "tf32", "tf32x3"),
    torch.float16: ("fp16",),
    torch.bfloat16: ("bf16",),
}
# For each precision: operand type of the tensor core, channels (k) of one instruction, parts that a number is split
# into.
KINDS = {"tf32": ("tf32", 8, 1), "tf32x3": ("f16", 16, 2), "fp16": ("f16", 16, 1), "bf16": ("bf16", 16, 1)}
DTYPES = {"tf32": torch.float32, "tf32x3": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def peak_name(dtype: torch.dtype, precision: str) -> str:
    """The name of the arithmetic: ``precision`` where the dtype has several, else its only one."""
    return precision if len(PRECISIONS[dtype]) > 1 else PRECISIONS[dtype][0]


# Stands for a precision: none was named, and torch's switch allows TF32 in convolutions.
TF32_ALLOWED = "tf32 allowed"
