"""32-bit division; 64-bit division takes many more instructions."""

from numba import int32, uint32

from numba_tconv.ptx import device_function


@device_function
def divided(a, b):
    """Quotient and remainder of non-negative int32."""
    quotient = int32(uint32(a) // uint32(b))
    return quotient, int32(a - quotient * b)
