"""How a problem is computed, and why so."""
