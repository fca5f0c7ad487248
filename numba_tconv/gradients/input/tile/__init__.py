"""grad_input_tile."""
