"""The CUDA simulator: blocks of Python threads, and instructions' meanings."""
