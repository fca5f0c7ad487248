"""For the CUDA simulator: blocks of threads, and what ptx/unrolled computes."""
