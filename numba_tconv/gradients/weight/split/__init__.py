"""grad_weight_split."""
