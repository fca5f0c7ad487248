"""Larger measurements."""
