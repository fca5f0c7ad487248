"""Lets the CUDA simulator run the kernels: its blocks of threads, and what ptx/unrolled computes."""
