"""The questions that decide the points of the exercises: `milestones/staff/grading/answers.py`.

A file for each milestone; `QUESTIONS` maps each exercise to a generator and a number of seeds. The
generator draws inputs from a random number, calls what the student has written, and yields (kind,
question, answer). An answer must be fixed by the docstrings and the handout: the answers of each
correct solution are the same. It should be nothing that the tree can tell in another way.

A kind is right or wrong as a whole. There are enough seeds that a mistake which breaks a kind
breaks it for ten of them or more: then no batch of submissions misses it.
"""
