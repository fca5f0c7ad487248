"""k5 in float64."""
