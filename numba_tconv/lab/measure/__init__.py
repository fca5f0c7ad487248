"""Workloads, timing, accuracy, and rows."""
