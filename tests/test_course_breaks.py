"""Each *Break it* of a handout does what the handout says. `break` and `predict` for students."""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from milestones.course import record
from milestones.course.exercise import Exercise
from milestones.course.release import command as release
from milestones.course.student import answers, break_it, predict
from milestones.course.student.handout import part
from tests import mini_course
from tests.conftest import ROOT

EXERCISES = [e for name in record.recorded(ROOT) for e in record.load(name)]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_a_mistake_does_what_the_record_says(exercise: Exercise) -> None:
    """All tests that fail are listed, and so is what happens to the answers of an engine."""
    effect = break_it.of_patch(exercise, ROOT, mini_course.shared_runner())
    assert effect.right and not any(result["error"] for result in effect.right.values())
    assert effect.run.error is None
    assert (effect.red, effect.answers) == (exercise.red, exercise.answers), exercise.id


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_a_handout_names_the_tests_that_fail(exercise: Exercise) -> None:
    """The answer names every one of them, unless it says how many there are."""
    question, answer = part("Break it", exercise, ROOT)
    assert question and answer
    named = dict.fromkeys(re.findall(r"`(test_\w+)`", answer))
    assert named.keys() <= {*exercise.red}, "the answer names a test that does not fail"
    if named.keys() != {*exercise.red}:
        assert f"{len(exercise.red)} tests" in " ".join(answer.split())
    if "Which test goes red" in " ".join(question.split()):
        assert len(exercise.red) == 1, "the question asks for one test"


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_every_exercise_asks_for_a_prediction(exercise: Exercise) -> None:
    question, answer = part("Predict", exercise, ROOT)
    assert question and answer and "<details>" not in question + answer
