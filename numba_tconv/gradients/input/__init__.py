"""grad_input."""
