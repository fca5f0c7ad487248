"""The gradient for the input on CUDA cores."""
