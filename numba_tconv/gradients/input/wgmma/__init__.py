"""grad_input_wgmma."""
