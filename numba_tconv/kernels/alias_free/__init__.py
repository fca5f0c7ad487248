"""The alias-free activation."""
