"""The lessons of the electives."""
