"""Compiled kernels, inspected."""
