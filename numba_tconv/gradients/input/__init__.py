"""The gradient for the input."""
