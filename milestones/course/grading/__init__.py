"""Grading: a submission's files under pristine tests, in processes that are shut off."""
