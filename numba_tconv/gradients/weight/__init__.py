"""grad_weight."""
