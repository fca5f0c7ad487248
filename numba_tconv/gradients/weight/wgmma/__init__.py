"""grad_weight_wgmma."""
