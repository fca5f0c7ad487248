"""Straight-line code instead of Numba's loops."""
