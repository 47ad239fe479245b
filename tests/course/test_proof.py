"""Proof of the exercises: each passes from its own solution on, and not before."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from milestones.chain import place
from milestones.course import catalog
from milestones.course.release.cut import cut
from milestones.course.release.student_tree import student_files, told
from milestones.course.testing.results import Run
from tests.conftest import ROOT
from tests.helpers import mini_course


class Stages:
    """The trees of a student's progress in a milestone, from no exercise solved to all of them."""

    def __init__(self, milestone: str, root: Path) -> None:
        self.milestone = milestone
        self.root = root
        self.exercises = catalog.load(milestone, root)
        self.files, _ = student_files(milestone, root)
        self.told = told(milestone, self.exercises, self.files)
        for path in (root / place(milestone)).rglob("*.py"):
            self.files[path.relative_to(root).as_posix()] = path.read_bytes()

    def write(self, solved: Collection[str], into: Path) -> Path:
        """Write a tree with the exercises in `solved` solved and the others cut. Returns `into`."""
        left = [exercise for exercise in self.exercises if exercise.id not in solved]
        changed = cut(self.milestone, left, self.root, self.told).files
        for name, data in self.files.items():
            path = into / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(changed[name].encode() if name in changed else data)
        return into


def problems(exercises: tuple[catalog.Exercise, ...], solved: int, run: Run) -> list[str]:
    """Return the problems in the results of a tree with the first `solved` exercises solved.

    A solved exercise must pass. Each test of an unsolved exercise must fail with the error of that
    exercise, or with the error of an unsolved exercise that it requires.
    """
    found = [f"{solved} solved: {run.error}"] if run.error else []
    done = {exercise.id for exercise in exercises[:solved]}
    for exercise in asked_of(exercises, solved):
        files = {test.partition("::")[0] for test in exercise.tests}
        results = [r for r in run.results if r.node.partition("::")[0] in files]
        needed = {exercise.id, *catalog.closure(exercise, exercises)} - done
        if not results:
            found.append(f"{solved} solved: no test of {exercise.id} ran")
        for result in results:
            what = f"{solved} solved: {result.node} of {exercise.id}"
            if exercise.id in done and not result.passed:
                why = result.failure
                found.append(f"{what} does not pass: {why and (why.message or why.explanation)}")
            elif exercise.id not in done and result.passed:
                found.append(f"{what} passes, and is not solved")
            elif exercise.id not in done and not needed & set(result.unwritten):
                why = result.failure
                found.append(f"{what} fails otherwise: {why and why.kind}: {why and why.message}")
    return found


def asked_of(exercises: tuple[catalog.Exercise, ...], solved: int) -> tuple[catalog.Exercise, ...]:
    """Return the exercises that are asked about a tree: the last solved one and the next one.

    All are asked about the trees with none and with all solved. So what an exercise changes, and
    what it leaves alone, is seen in the tree where it begins to pass.
    """
    if solved in (0, len(exercises)):
        return exercises
    return exercises[solved - 1 : solved + 1]


def prove(milestone: str, root: Path, folder: Path) -> list[str]:
    """Return all problems of a milestone's exercises, from none solved to all solved."""
    stages = Stages(milestone, root)
    exercises, found = stages.exercises, []
    for solved in range(len(exercises) + 1):
        tests = [test for exercise in asked_of(exercises, solved) for test in exercise.tests]
        ids = [exercise.id for exercise in exercises[:solved]]
        tree = stages.write(ids, folder / f"{milestone}-{solved}")
        run = mini_course.shared_runner().run(tree, tests, seconds=60)
        found += problems(exercises, solved, run)
    return found


@pytest.mark.thorough("all tests of a milestone for each number of solved exercises")
@pytest.mark.electives
def test_the_exercises_of_a_milestone(milestone: str, tmp_path: Path) -> None:
    """With solutions 1..k, exercise k passes, and the next one fails with its own error.

    Without solutions, all fail; with all solutions, all pass.
    """
    if milestone in catalog.taught_engines(ROOT):
        assert not (wrong := prove(milestone, ROOT, tmp_path)), "\n".join(wrong)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (None, "", "", None),
        ("tests/exercises/test_m2_1.py", "== 2,", "== 3,", "1 solved: .* does not pass: I3"),
        (
            "tests/exercises/test_m2_2.py", "    assert largest(shelf) == 2", "    pass",
            "1 solved: .*test_the_largest of m2.2 passes, and is not solved",
        ),
        (
            "tests/exercises/test_m2_2.py", "    assert largest(shelf) == 2", "    raise KeyError",
            "1 solved: .*test_the_largest of m2.2 fails otherwise: KeyError",
        ),
        (
            "milestones/m2_mini/exercises.toml", 'requires = ["m2.1"]', "",
            "0 solved: .*test_the_sum of m2.2 fails otherwise: NotImplementedError: m2.1",
        ),
    ],
)  # fmt: skip
def test_the_proof_can_fail(
    tmp_path: Path, file: str | None, old: str, new: str, said: str | None
) -> None:
    root = mini_course.make(tmp_path / "root")
    if file is not None:
        text = (root / file).read_text()
        assert old in text
        (root / file).write_text(text.replace(old, new))
    found = prove("m2_mini", root, tmp_path)
    if said is None:
        assert found == []
    else:
        with pytest.raises(AssertionError, match=said):
            raise AssertionError("\n".join(found))
