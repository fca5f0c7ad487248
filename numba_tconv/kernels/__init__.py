"""The rungs of the forward pass."""
