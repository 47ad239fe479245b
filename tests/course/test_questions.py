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
from milestones.staff.grading.answers import Answers, Questions, compare, right_answers
from milestones.staff.grading.client import ForkServer
from milestones.staff.grading.limits import Limits
from tests.conftest import ROOT
from tests.helpers.deselected import thorough_except

EXERCISES = [e for name in catalog.taught_engines(ROOT) for e in catalog.load(name)]
SEEDS = tuple(range(12))
FIRST = SEEDS[:3]  # one of them notices most mistakes
LIMITS = Limits(seconds=120)
SHORT = Limits(seconds=10)  # some mistakes hang
# A solution with one of these mistakes gives the right answers: it only takes more time or memory,
# or it is wrong where only a test looks.
UNNOTICED = {
    "failed_and_still_running",  # m1; the shell sends all requests back after a failure
    "failed_step_is_not_undone",  # m2; for the same reason
    "decode_copies_the_cache",  # m2
    "retracted_does_not_count",  # m3
    "resolve_by_a_mask", "the_thread_keeps_its_work",  # m5
    "a_plan_into_a_retraction",  # multi_step
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
            self.skeletons[milestone] = course.template
            self.references[milestone] = submission.complete(
                course, ROOT, course.template, folder / "reference"
            )

    def answers(
        self, tree: Path, exercise: str, questions: Questions, limits: Limits = LIMITS
    ) -> Answers:
        outcome = self.server.examine(tree, (), limits, (ROOT,), exercise, questions.seeds)
        assert outcome.broken is None
        return compare(questions, outcome.said, outcome.ended)

    def right(self, tree: Path, exercise: str) -> tuple[Questions, list[str]]:
        outcome = self.server.examine(tree, (), LIMITS, (ROOT,), exercise, SEEDS)
        return right_answers(SEEDS, outcome.said, outcome.ended)

    def notice(self, mutant: catalog.Mutant, tree: Path, questions: Questions) -> bool:
        """Return whether a tree with a mistake has a wrong answer. Ask a few questions first: of a
        mistake that hangs, each question takes its time limit."""
        asked = [(FIRST, SHORT), (SEEDS[len(FIRST) :], SHORT)]
        if mutant.name in UNNOTICED:  # no time limit is to notice it
            asked = [(SEEDS, LIMITS)]
        return any(
            self.answers(tree, mutant.exercise, Questions(seeds, questions.right), limits).wrong
            for seeds, limits in asked
        )


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trees]:
    with ForkServer(tmp_path_factory.mktemp("scratch")) as server:
        yield Trees(server, tmp_path_factory.mktemp("trees"))


@pytest.mark.parametrize(
    "exercise",
    thorough_except(("m1.1",), EXERCISES, "an exam for each mutant of each exercise"),
    ids=lambda exercise: exercise.id,
)
def test_only_code_without_a_mistake_has_the_right_answers(
    exercise: Exercise, trees: Trees, tmp_path: Path
) -> None:
    """The reference answers the same twice. A skeleton has no right answer to guess."""
    trees.enter(exercise.milestone)
    reference = trees.references[exercise.milestone]
    questions, faults = trees.right(reference, exercise.id)
    assert not faults
    right = trees.answers(reference, exercise.id, questions)
    assert (right.right, right.wrong) == (len(SEEDS), "")
    unwritten = trees.answers(trees.skeletons[exercise.milestone], exercise.id, questions)
    assert unwritten.right == 0
    assert "is yours to write" in unwritten.wrong
    unnoticed = set()
    mistakes = [m for m in catalog.mutants(exercise.milestone) if m.exercise == exercise.id]
    for mutant in mistakes:
        tree = shutil.copytree(reference, tmp_path / mutant.name)
        subprocess.run(
            ["patch", "-p1", "-s", "-d", str(tree)], input=mutant.patch.encode(), check=True
        )
        if not trees.notice(mutant, tree, questions):
            unnoticed.add(mutant.name)
    assert unnoticed == {mutant.name for mutant in mistakes} & UNNOTICED
