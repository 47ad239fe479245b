"""The commands of a student: list, check, hint, reset, doctor."""
