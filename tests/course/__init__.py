"""The course: catalog, handouts, releases, the console of a student, the grader."""
