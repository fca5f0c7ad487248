"""k4: tiles of sums in registers, on CUDA cores."""
