"""Fakes, oracles and other helpers of the tests. No file here is a test."""
