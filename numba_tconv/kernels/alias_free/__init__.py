"""The alias-free activation: up-sampling, activation and down-sampling in one kernel."""
