"""Measures the engines: workloads, other engines, curves, roofline, and checks on a GPU."""
