"""The six invariants, on every engine."""
