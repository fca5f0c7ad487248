"""The gradient for the input on Hopper's tensor cores."""
