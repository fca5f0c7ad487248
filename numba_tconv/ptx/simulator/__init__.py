"""The CUDA simulator's part: blocks of Python threads, and the meaning of each instruction."""
