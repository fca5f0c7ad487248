"""Shared by the rungs on tensor cores."""
