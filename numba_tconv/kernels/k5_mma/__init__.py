"""k5: warps on tensor cores."""
