"""The instructions in the CUDA simulator: blocks of Python threads, and what each instruction means there."""
