"""Grading: the files of a submission with the original tests, in isolated processes."""
