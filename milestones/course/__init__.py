"""The course: its record, and the tools that release, check and prove it."""
