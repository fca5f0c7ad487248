"""Inspection of compiled kernels."""
