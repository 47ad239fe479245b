"""The parts of an engine: schedulers, caches, sampling, overlap, failures, interrupts."""
