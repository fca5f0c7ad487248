"""k5: warps that multiply on tensor cores."""
