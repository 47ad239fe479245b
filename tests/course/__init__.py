"""The course: record, handouts, releases, the console of a student, the grader."""
