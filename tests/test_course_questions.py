"""The questions that decide points: the reference and a skeleton answer them, and mutants do."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from milestones.course import record
from milestones.course.grading import submission
from milestones.course.grading.answers import Answers, Questions
from milestones.course.grading.client import ForkServer
from milestones.course.grading.limits import Limits
from tests.conftest import ENGINES, ROOT

SEEDS = tuple(range(12))
LIMITS = Limits(seconds=120)
SHORT = Limits(seconds=20)  # some mistakes hang
# A solution with one of these mistakes gives the right answers: it only takes more time or memory,
# or it is wrong where only a test looks.
UNNOTICED = {
    "m1_single": {"an_interrupt_keeps_its_cache"},
    "m2_continuous": {"decode_copies_the_cache"},
    "m3_paged": {"retracted_does_not_count"},
    "m4_radix": set(),
    "m5_overlap": {"resolve-by-a-mask", "the-thread-keeps-its-work"},
}


class Asked:
    """The questions of a milestone, with the answers of the reference."""

    def __init__(self, server: ForkServer, milestone: str, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.course = submission.prepare(milestone, ROOT, folder)
        self.skeleton = self.course.template
        self.reference = submission.complete(
            self.course, ROOT, self.course.template, folder / "reference"
        )
        self.questions: dict[str, Questions] = {}
        for exercise in self.course.exercises:
            _, self.questions[exercise.id] = server.collect(
                self.reference, exercise.tests, exercise.id, SEEDS
            )

    def answers(self, tree: Path, exercise: str, limits: Limits = LIMITS) -> Answers:
        questions = self.questions[exercise]
        outcome = self.server.examine(tree, (), limits, (ROOT,), exercise, questions)
        assert outcome.broken is None and outcome.answers is not None
        return outcome.answers


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(tmp_path_factory.mktemp("scratch")) as server:
        yield server


@pytest.fixture(scope="module", params=ENGINES)
def asked(
    request: pytest.FixtureRequest, server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Asked:
    return Asked(server, request.param, tmp_path_factory.mktemp(request.param))


def test_the_reference_answers_and_a_skeleton_does_not(asked: Asked) -> None:
    """The reference answers the same twice. A skeleton has no right answer to guess."""
    for exercise in asked.course.exercises:
        right = asked.answers(asked.reference, exercise.id)
        assert (right.right, right.wrong) == (len(SEEDS), ""), exercise.id
        unwritten = asked.answers(asked.skeleton, exercise.id)
        assert unwritten.right == 0, exercise.id
        assert "is yours to write" in unwritten.wrong


def test_a_mistake_gives_a_wrong_answer(asked: Asked) -> None:
    unnoticed = set()
    for mutant in record.mutants(asked.course.milestone):
        tree = shutil.copytree(asked.reference, asked.folder / "mutant")
        subprocess.run(
            ["patch", "-p1", "-s", "-d", str(tree)], input=mutant.patch.encode(), check=True
        )
        if asked.answers(tree, mutant.exercise, SHORT).right == len(SEEDS):
            unnoticed.add(mutant.name)
        shutil.rmtree(tree)
    assert unnoticed == UNNOTICED.get(asked.course.milestone, set())
