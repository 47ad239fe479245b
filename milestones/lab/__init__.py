"""What measures and attacks the engines: benchmarks, the soak, and instruments for tests."""
