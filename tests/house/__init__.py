"""The rules of the repository: layout, language, deltas, set-up, the console."""
