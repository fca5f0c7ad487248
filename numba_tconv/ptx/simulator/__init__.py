"""For the CUDA simulator."""
