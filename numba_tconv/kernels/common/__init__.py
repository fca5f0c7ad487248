"""Shared by several rungs."""
