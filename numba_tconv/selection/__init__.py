"""All rungs by name, and which of them computes a problem."""
