"""Measurement, reports, explanation, commands."""
