"""Measures the engines: workloads, peers, curves, roofline, and checks on a GPU."""
