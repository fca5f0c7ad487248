"""Forward rungs."""
