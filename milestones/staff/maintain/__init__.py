"""For maintainers: carry edits up the ladder, prove the tests with mutants, draw figures."""
