"""Division of counts in 32 bits: in 64 the GPU, which has no instruction for it, takes about a hundred."""

from numba import int32, uint32

from numba_tconv.ptx import device_function


@device_function
def divided(a, b):
    """Quotient and remainder of int32 that are not negative."""
    quotient = int32(uint32(a) // uint32(b))
    return quotient, int32(a - quotient * b)
