"""The questions that decide points: the reference and a skeleton answer them, and mutants do."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from milestones.course import catalog
from milestones.course.exercise import Exercise
from milestones.staff.grading import submission
from milestones.staff.grading.answers import Answers, Questions, compare, right_answers, seed_of
from milestones.staff.grading.client import ForkServer, Outcome
from milestones.staff.grading.limits import Limits
from tests.conftest import ROOT
from tests.helpers.deselected import thorough_except

EXERCISES = [e for name in catalog.taught_engines(ROOT) for e in catalog.load(name)]
EXAMS, AT_ONCE = 2, 4  # an exam has the questions of some batches: a process for each takes long
MOST_KINDS = 6  # more would not fit into a student's report
LIMITS = Limits(seconds=120)
SHORT = Limits(seconds=30)  # some mistakes hang
MORE = f"""
QUESTIONS = {{name: (ask, {AT_ONCE} * count) for name, (ask, count) in QUESTIONS.items()}}
"""
# A solution with one of these mistakes gives the right answers: it only takes more time or memory,
# or it is wrong where only a test looks.
UNNOTICED = {
    "failed_and_still_running",  # m1; the shell sends all requests back after a failure
    "failed_step_is_not_undone",  # m2; for the same reason
    "decode_copies_the_cache",  # m2
    "retracted_does_not_count",  # m3
    "resolve_by_a_mask", "the_thread_keeps_its_work",  # m5
}  # fmt: skip


class Trees:
    """The trees of the milestones, and the process that asks the code in them."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.skeletons: dict[str, Path] = {}
        self.references: dict[str, Path] = {}

    def enter(self, milestone: str) -> None:
        """Make the trees of a milestone, if they are not there yet."""
        if milestone not in self.skeletons:
            folder = self.folder / milestone
            folder.mkdir()
            course = submission.prepare(milestone, ROOT, folder)
            with (course.template / submission.QUESTIONS).open("a") as file:
                file.write(MORE)
            self.skeletons[milestone] = course.template
            self.references[milestone] = submission.complete(
                course, ROOT, course.template, folder / "reference"
            )

    def sit(self, tree: Path, exercise: str, number: int, limits: Limits = LIMITS) -> Outcome:
        outcome = self.server.examine(
            tree, (), limits, (ROOT,), exercise, seed_of(number, exercise)
        )
        assert outcome.broken is None
        return outcome

    def right(self, tree: Path, exercise: str, number: int) -> Questions:
        outcome = self.sit(tree, exercise, number)
        questions, faults = right_answers(number, outcome.said, outcome.ended)
        assert outcome.asked and not faults
        return questions

    def answers(
        self, tree: Path, exercise: str, questions: Questions, limits: Limits = LIMITS
    ) -> list[Answers]:
        """Return the answers in each of the batches of an exam."""
        outcome = self.sit(tree, exercise, questions.seed, limits)
        count, seeds = len(questions.right) // AT_ONCE, [*questions.right.items()]
        return [
            compare(Questions(0, dict(seeds[at : at + count])), outcome.said, outcome.ended)
            for at in range(0, len(seeds), count)
        ]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trees]:
    with ForkServer(tmp_path_factory.mktemp("scratch")) as server:
        yield Trees(server, tmp_path_factory.mktemp("trees"))


EACH = pytest.mark.parametrize(
    "exercise",
    thorough_except(("m1.1",), EXERCISES, "exams for each mutant of each exercise"),
    ids=lambda exercise: exercise.id,
)


@EACH
def test_only_what_is_written_has_right_answers(exercise: Exercise, trees: Trees) -> None:
    """The reference answers the same twice. A skeleton has no kind of right answers to guess."""
    trees.enter(exercise.milestone)
    reference, skeleton = (t[exercise.milestone] for t in (trees.references, trees.skeletons))
    questions = trees.right(reference, exercise.id, 0)
    right = trees.answers(reference, exercise.id, questions)
    assert {answers.share for answers in right} == {1}
    kinds = {frozenset(answers.kinds) for answers in right}
    assert len(kinds) == 1, "a kind is so rare that some batches do not ask for it"
    assert len(min(kinds)) <= MOST_KINDS
    for unwritten in trees.answers(skeleton, exercise.id, questions):
        assert unwritten.share == 0
        assert all("is yours to write" in fault for fault in unwritten.wrong.values())


@EACH
def test_a_mistake_costs_the_same_points_in_each_batch(
    exercise: Exercise, trees: Trees, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Points do not depend on the seeds: in all batches, the same kinds of questions are wrong."""
    trees.enter(exercise.milestone)
    reference = trees.references[exercise.milestone]
    exams = EXAMS if request.config.getoption("--thorough") else 1
    papers = [trees.right(reference, exercise.id, number) for number in range(exams)]
    unnoticed = set()
    mistakes = [m for m in catalog.mutants(exercise.milestone) if m.exercise == exercise.id]
    for mutant in mistakes:
        tree = shutil.copytree(reference, tmp_path / mutant.name)
        subprocess.run(
            ["patch", "-p1", "-s", "-d", str(tree)], input=mutant.patch.encode(), check=True
        )
        limits = LIMITS if mutant.name in UNNOTICED else SHORT  # no time limit is to notice it
        found = {
            frozenset(answers.wrong)
            for questions in papers
            for answers in trees.answers(tree, exercise.id, questions, limits)
        }
        assert len(found) == 1, f"{mutant.name}: {sorted(map(sorted, found))}"
        unnoticed |= {mutant.name} if found == {frozenset()} else set()
    assert unnoticed == {mutant.name for mutant in mistakes} & UNNOTICED
