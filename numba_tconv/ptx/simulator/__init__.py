"""The CUDA simulator: blocks, and meanings."""
