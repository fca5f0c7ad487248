"""Measurement, reports and commands. No other layer imports it."""
