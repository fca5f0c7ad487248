"""Kernels: compile, cache, load, launch on torch's stream."""
