"""Shared by tensor-core rungs."""
