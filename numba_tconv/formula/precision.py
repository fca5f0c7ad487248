"""The precisions of each dtype by name, and what the tensor cores multiply for each."""

from __future__ import annotations

import torch

# What `precision` may be for each dtype that the kernels take; the first is the default, unless torch allows TF32.
PRECISIONS = {
    torch.float64: ("fp64",),
    torch.float32: ("ieee", "tf32", "tf32x3"),
    torch.float16: ("fp16",),
    torch.bfloat16: ("bf16",),
}
# Of each precision: the tensor core's name for the operands, channels of one product, and parts of a number.
KINDS = {"tf32": ("tf32", 8, 1), "tf32x3": ("f16", 16, 2), "fp16": ("f16", 16, 1), "bf16": ("bf16", 16, 1)}
DTYPES = {"tf32": torch.float32, "tf32x3": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def peak_name(dtype: torch.dtype, precision: str) -> str:
    """The name of the arithmetic: ``precision`` where the dtype leaves a choice, else its only one."""
    return precision if len(PRECISIONS[dtype]) > 1 else PRECISIONS[dtype][0]


# In the place of a precision: the caller has named none, and torch's switch lets convolutions use TF32.
TF32_ALLOWED = "tf32 allowed"
