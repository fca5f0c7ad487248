"""Gradients of the alias-free activation for its input and for Snake's alpha and beta."""
