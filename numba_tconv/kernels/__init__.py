"""The forward pass: a file or a folder a rung."""
