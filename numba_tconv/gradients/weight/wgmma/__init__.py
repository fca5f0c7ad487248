"""The gradient for the weight on Hopper's tensor cores."""
