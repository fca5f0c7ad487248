"""How and why a problem is computed so."""
