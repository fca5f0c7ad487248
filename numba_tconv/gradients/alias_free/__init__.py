"""Gradients of the alias-free activation."""
