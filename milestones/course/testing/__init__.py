"""Runs pytest in processes of its own, and returns the results as data."""
