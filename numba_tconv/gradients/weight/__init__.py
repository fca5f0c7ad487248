"""The gradient for the weight."""
