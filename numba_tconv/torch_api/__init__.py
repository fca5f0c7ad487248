"""The face to torch."""
