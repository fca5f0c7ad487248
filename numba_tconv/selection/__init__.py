"""Which rung computes a problem."""
