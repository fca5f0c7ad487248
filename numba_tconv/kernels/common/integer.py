"""Division in 32 bits: GPUs have no instruction for a 64-bit division, which takes about a hundred instead."""

from numba import int32, uint32

from numba_tconv.ptx import device_function


@device_function
def divided(a, b):
    """Quotient and remainder of two int32, which must not be negative."""
    quotient = int32(uint32(a) // uint32(b))
    return quotient, int32(a - quotient * b)
