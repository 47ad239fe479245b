"""Grade the submissions of one milestone."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...course.exercise import Exercise
from . import submission
from .answers import Questions, compare, right_answers, seed_of
from .client import ForkServer, GraderError
from .gradebook import Mark, Sheet, why
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
        out_of_sight: list[Path], seed: int,
    ) -> None:  # fmt: skip
        self.fork_server = fork_server
        self.course = course
        self.limits = limits
        self.scratch = scratch
        self.out_of_sight = out_of_sight
        self.papers: dict[str, Paper] = {}
        self.seed = seed  # those of all exercises are derived from it

    def set_papers(self, root: Path) -> None:
        """Collect the tests and the right answers, before any submission is in a tree."""
        course, collect = self.course, self.fork_server.collect
        place = Path(tempfile.mkdtemp(dir=self.scratch))
        place.chmod(0o711)  # as for a submission; no graded code runs while the reference is here
        with_hidden = tree = submission.complete(course, root, course.template, place / "tree")
        if template := course.template_hidden:
            with_hidden = submission.complete(course, root, template, place / "hidden")
        for exercise in course.exercises:
            tests = collect(tree, exercise.tests, exercise.id)
            files = course.hidden.get(exercise.id)
            hidden = collect(with_hidden, files, None) if files else []
            questions = self._right(exercise.id, tree, tests[:1])
            self.papers[exercise.id] = Paper(tuple(tests), tuple(hidden), questions)
        submission.keep_compiled(course, tree)
        shutil.rmtree(place)

    def _right(self, exercise: str, tree: Path, tests: list[str]) -> Questions:
        """Let the reference sit the exam of an exercise, with its first test, as submissions do.

        Raises `GraderError` if it cannot: the reason would cost each submission its points.
        """
        seed, examine = seed_of(self.seed, exercise), self.fork_server.examine
        outcome = examine(tree, tests, self.limits, self.out_of_sight, exercise, seed)
        questions, faults = right_answers(seed, outcome.said, outcome.ended)
        faults += [] if outcome.asked else [outcome.ended]
        faults += [outcome.broken] if outcome.broken else []
        for result in outcome.results:
            faults += [] if result.passed else [result.node, *why(result)]
        if faults:
            raise GraderError(
                "\n    ".join([f"{exercise}: the reference fails in the sandbox:", *faults])
            )
        return questions

    def sheet(self, student: Submission) -> Sheet:
        """Grade one submission."""
        started = time.monotonic()
        with self.tree(student, self.course.template) as tree:
            exam = _Sitting(self, student, tree)
            marks = [exam.mark(exercise) for exercise in self.course.exercises]
        sheet = Sheet(student.name, self.course.milestone, marks, notes=student.notes)
        sheet.digest, sheet.seed = student.digest, self.seed
        sheet.not_run = [f"{m.exercise.id}: {r}" for m in marks for r in m.refused]
        sheet.not_run += [f"{m.exercise.id}: {m.broken}" for m in marks if m.broken]
        if exam.missing:
            sheet.not_run.append(f"graded code had access to: {'; '.join(exam.missing)}")
        sheet.seconds = time.monotonic() - started
        return sheet

    @contextmanager
    def tree(self, student: Submission, template: Path) -> Iterator[Path]:
        """Make a tree for a submission, which another user can enter but not find by listing."""
        place = Path(tempfile.mkdtemp(prefix="exam-", dir=self.scratch))
        place.chmod(0o711)
        try:
            yield submission.lay_out(student, template, place / "tree")
        finally:
            shutil.rmtree(place, ignore_errors=True)


class _Sitting:
    """The exams of one submission, one exercise after the other."""

    def __init__(self, grader: Grader, student: Submission, tree: Path) -> None:
        self.grader = grader
        self.student = student
        self.tree = tree
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
        seed = paper.questions.seed
        outcome = examine(self.tree, paper.tests, limits, hidden, exercise.id, seed)
        self.missing.update(dict.fromkeys(outcome.missing))
        self.endless_import = outcome.endless_import
        answers = compare(paper.questions, outcome.said, outcome.ended)
        mark = Mark(exercise, outcome.results, answers, broken=outcome.broken)
        if self.endless_import:
            mark.refused = [self.endless_import]
        elif paper.hidden and (template := grader.course.template_hidden):
            with grader.tree(self.student, template) as tree:  # there only during these tests
                more = examine(tree, paper.hidden, limits, hidden)
            mark.results += more.results
            mark.broken = mark.broken or more.broken
        return mark
