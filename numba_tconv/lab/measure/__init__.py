"""Workloads, timing, accuracy, and the rows made of them."""
