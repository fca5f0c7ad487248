"""The alias-free activation in one kernel."""
