"""`python -m milestones mutants`: it says which mutants are killed, and all real ones are."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import pytest

from milestones.chain import is_elective
from milestones.course import catalog
from milestones.course.testing.runner import Runner
from milestones.staff.maintain import mutants
from milestones.staff.maintain.mutants import Fate
from tests.conftest import ROOT
from tests.helpers import mini_course

FULL = "tests/exercises/test_m2_1.py::test_a_full_shelf_refuses"
COUNTED = "tests/exercises/test_m2_1.py::test_items_are_counted"
OLD = "        if len(self.items) >= ROOM:  # the secret of put"
PATCHES = {
    "survives": (COUNTED, OLD, "        if len(self.items) > ROOM:"),
    "stale": (FULL, "        if len(self.items) is full:", "        if False:"),
    "unparsable": (FULL, OLD, "        if len(self.items >= ROOM:"),
    "dies": (FULL, OLD, "        if len(self.items) == -1:"),
}
PATCH = """
Mutant: {name}
Exercise: m2.1
Mistake: A test of the machinery.
Killed-by: {test}

--- a/m2_mini/shelf.py
+++ b/m2_mini/shelf.py
@@ -23,3 +23,3 @@
         \"\"\"
-{old}
+{new}
             raise ValueError("no room")
"""


@pytest.fixture(scope="module")
def runner() -> Runner:
    return mini_course.shared_runner()


@pytest.fixture(scope="module")
def fates(
    runner: Runner, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[bytes, int], dict[str, Fate]]:
    """Try the mutants of the small course and those above, once.

    Returns the course's root, a snapshot from before, and the fates by name.
    """
    root = mini_course.make(tmp_path_factory.mktemp("course"))
    with (root / "milestones/m2_mini/mutants.patch").open("a") as file:
        for name, (test, old, new) in PATCHES.items():
            file.write(PATCH.format(name=name, test=test, old=old, new=new))
    before = snapshot(root)
    found = {
        f.mutant.name: f for f in mutants.fates_of(mutants.choose("m2", None, root), runner, root)
    }
    return root, before, found


def snapshot(root: Path) -> dict[bytes, int]:
    return Counter(p.read_bytes() for p in (root / "m2_mini").rglob("*") if p.is_file())


def test_each_fate_has_its_name(fates: tuple[Path, dict[bytes, int], dict[str, Fate]]) -> None:
    root, before, found = fates
    assert {name: fate.state for name, fate in found.items()} == {
        "dies": "killed", "one_too_many": "killed", "stale": "stale", "survives": "survived",
        "unparsable": "broken",
    }  # fmt: skip
    assert "patch does not apply" in found["stale"].words
    assert "cannot be imported" in found["unparsable"].words
    assert "gave no error, not ValueError" in found["dies"].words
    assert snapshot(root) == before, "the working tree was written to"


def test_a_test_that_is_red_anyway_kills_nothing(runner: Runner, tmp_path: Path) -> None:
    root = mini_course.make(tmp_path)
    test = root / "tests/exercises/test_m2_1.py"
    test.write_text(test.read_text().replace("range(3)", "range(4)"))
    (fate,) = mutants.fates_of(mutants.choose(None, "m2.1", root), runner, root)
    assert (fate.state, fate.mutant.name) == ("red", "one_too_many")


def run(root: Path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    mutants.add_arguments(parser)
    args = parser.parse_args(words)
    args.root = root
    return mutants.main(args)


def test_survivors_and_stale_patches_end_with_1(
    fates: tuple[Path, dict[bytes, int], dict[str, Fate]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, _, found = fates
    monkeypatch.setattr(mutants, "Runner", NoRunner)
    for chosen, status in ((list(found.values()), 1), ([found["dies"]], 0), ([], 0)):
        monkeypatch.setattr(mutants, "fates_of", lambda *_, chosen=chosen: iter(chosen))
        assert run(root, "m2") == status
    out = capsys.readouterr().out
    assert "milestones/m2_mini: survives: survived: " in out
    assert "2 of 5 killed" in out
    assert run(root, "m2", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


class NoRunner:
    def __enter__(self) -> NoRunner:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("m9",), "there is no milestone 'm9'"),
        (("--exercise", "m2.7"), "there is no exercise m2.7; m2_mini has m2.1, m2.2"),
        (("m1", "--exercise", "m2.1"), "m2.1 is an exercise of m2_mini, not of m1"),
    ],
)
def test_refusals(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(mini_course.make(tmp_path), *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.thorough("it runs tests on hundreds of mutants")
@pytest.mark.parametrize("name", catalog.taught_engines(ROOT))
def test_every_mistake_of_the_course_is_caught(name: str, runner: Runner) -> None:
    found = list(mutants.fates_of(mutants.choose(name, None), runner))
    assert [(f.mutant.name, f.state, f.words) for f in found if f.state != "killed"] == []
    assert len(found) >= (4 if is_elective(name) else 6)
