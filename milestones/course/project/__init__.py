"""Week 6 and a student's own project: the parts of a step, and a change compared with its base."""
