"""Straight-line code where Numba would leave a loop."""
