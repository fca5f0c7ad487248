"""Precisions of each dtype."""

import torch

# The first is the default, unless torch allows TF32.
PRECISIONS = {
    torch.float64: ("fp64",),
    torch.float32: ("ieee", "tf32", "tf32x3"),
    torch.float16: ("fp16",),
    torch.bfloat16: ("bf16",),
}
# Tensor cores' operand type, an instruction's channels (k), the numbers an operand is split into.
KINDS = {"tf32": ("tf32", 8, 1), "tf32x3": ("f16", 16, 2), "fp16": ("f16", 16, 1), "bf16": ("bf16", 16, 1)}
DTYPES = {"tf32": torch.float32, "tf32x3": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def peak_name(dtype: torch.dtype, precision: str) -> str:
    """The key of PEAK_FLOPS for ``dtype`` in ``precision``."""
    return precision if len(PRECISIONS[dtype]) > 1 else PRECISIONS[dtype][0]


# In place of a precision, if none is named and torch allows TF32.
TF32_ALLOWED = "tf32 allowed"
