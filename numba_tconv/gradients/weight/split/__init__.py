"""The gradient for the weight on CUDA cores."""
