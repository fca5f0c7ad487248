"""From a Python function to a running kernel: compile, keep, load, launch on torch's stream."""
