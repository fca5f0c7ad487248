"""The three gradients."""
