"""Models: loading, support checks, faster modules, and kernels for a CPU."""
