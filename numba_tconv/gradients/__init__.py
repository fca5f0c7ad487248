"""The gradients for input, weight and bias."""
