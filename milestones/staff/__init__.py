"""What instructors and maintainers run: the grader, mutants, figures and merges."""
