"""Larger measurements: KernelBench, decoders, training."""
