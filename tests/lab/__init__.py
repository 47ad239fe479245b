"""Benchmarks, the soak, and what can be tested of the GPU's path without a GPU."""
