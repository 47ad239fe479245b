"""Grade the submissions of one milestone."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ..exercise import Exercise
from . import submission
from .answers import Questions, draw_seeds
from .client import ForkServer
from .gradebook import Mark, Sheet
from .limits import Limits
from .submission import Course, Submission


@dataclass(frozen=True)
class Paper:
    """What an exercise is graded by: tests, hidden tests, and questions with their answers."""

    tests: tuple[str, ...]
    hidden: tuple[str, ...]
    questions: Questions


class Grader:
    """Grades submissions of one milestone. Its methods may run in several threads."""

    def __init__(
        self, fork_server: ForkServer, course: Course, limits: Limits, scratch: Path,
        out_of_sight: list[Path],
    ) -> None:  # fmt: skip
        self.fork_server = fork_server
        self.course = course
        self.limits = limits
        self.scratch = scratch
        self.out_of_sight = out_of_sight
        self.papers: dict[str, Paper] = {}

    def set_papers(self, root: Path) -> None:
        """Collect the tests and the right answers, before any submission is in a tree."""
        course, collect = self.course, self.fork_server.collect
        tree = submission.complete(course, root, course.template, self.scratch / "reference")
        with_hidden = tree
        if course.template_hidden is not None:
            place = self.scratch / "reference-hidden"
            with_hidden = submission.complete(course, root, course.template_hidden, place)
        for exercise in course.exercises:
            tests, questions = collect(tree, exercise.tests, exercise.id, draw_seeds())
            hidden: list[str] = []
            if files := course.hidden.get(exercise.id):
                hidden, _ = collect(with_hidden, files, None, ())
            self.papers[exercise.id] = Paper(tuple(tests), tuple(hidden), questions)
        shutil.rmtree(tree)
        shutil.rmtree(with_hidden, ignore_errors=True)

    def sheet(self, student: Submission) -> Sheet:
        """Grade one submission."""
        started = time.monotonic()
        place = Path(tempfile.mkdtemp(prefix="exam-", dir=self.scratch))
        place.chmod(0o711)
        try:
            exam = _Sitting(self, student, place)
            marks = [exam.mark(exercise) for exercise in self.course.exercises]
        finally:
            shutil.rmtree(place, ignore_errors=True)
        sheet = Sheet(student.name, self.course.milestone, marks, notes=student.notes)
        sheet.digest = student.digest
        sheet.not_run = [f"{m.exercise.id}: {r}" for m in marks for r in m.refused]
        sheet.not_run += [f"{m.exercise.id}: {m.broken}" for m in marks if m.broken]
        if exam.missing:
            sheet.not_run.append(f"graded code had access to: {'; '.join(exam.missing)}")
        sheet.seconds = time.monotonic() - started
        return sheet


class _Sitting:
    """The exams of one submission, one exercise after the other."""

    def __init__(self, grader: Grader, student: Submission, place: Path) -> None:
        self.grader = grader
        self.student = student
        self.tree = submission.lay_out(student, grader.course.template, place / "tree")
        self.tree_hidden: Path | None = None
        if template := grader.course.template_hidden:
            self.tree_hidden = submission.lay_out(student, template, place / "hidden")
        self.missing: dict[str, None] = {}
        self.endless_import: str | None = None

    def mark(self, exercise: Exercise) -> Mark:
        """Grade one exercise."""
        if reasons := self.student.reasons(exercise):
            return Mark(exercise, refused=reasons)
        if self.endless_import:  # all exercises import the same package
            return Mark(exercise, refused=[self.endless_import])
        grader, paper = self.grader, self.grader.papers[exercise.id]
        examine, limits, hidden = grader.fork_server.examine, grader.limits, grader.out_of_sight
        outcome = examine(self.tree, paper.tests, limits, hidden, exercise.id, paper.questions)
        self.missing.update(dict.fromkeys(outcome.missing))
        self.endless_import = outcome.endless_import
        assert outcome.answers is not None
        mark = Mark(exercise, outcome.results, outcome.answers, broken=outcome.broken)
        if self.endless_import:
            mark.refused = [self.endless_import]
        elif paper.hidden and self.tree_hidden is not None:
            more = examine(self.tree_hidden, paper.hidden, limits, hidden)
            mark.results += more.results
            mark.broken = mark.broken or more.broken
        return mark
