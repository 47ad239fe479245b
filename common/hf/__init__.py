"""Hugging Face models: load and check them, make tiny ones, and share one between engines."""
