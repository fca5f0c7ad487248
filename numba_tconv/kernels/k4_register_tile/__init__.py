"""k4: sums in registers, on CUDA cores."""
