"""`python -m milestones grade`: points, reports, and the files taken from a submission."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from milestones.course.grading import command as grade
from milestones.course.grading import static_checks, submission
from milestones.course.grading.exam import judge
from milestones.course.testing.results import Result
from tests import hostile
from tests.conftest import ROOT
from tests.mini_course import SHELF
from tests.submissions import SOURCE, arguments, hand_in, make_course, skeleton_of

HALF_RIGHT = """
def put(self, item):
    self.items.append(item)
    return 1 + (item == 5)
Shelf.put = put
"""
HIDDEN = """
from m2_mini.shelf import Shelf


def test_that_nobody_knows() -> None:
    shelf = Shelf()
    assert [shelf.put(1) for _ in range(3)] == [1, 2, 3]
"""


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_course(tmp_path_factory.mktemp("course"))


@pytest.fixture(scope="module")
def skeleton(course: Path) -> str:
    return skeleton_of(course)


class Few:
    """Grades four submissions with a hidden test and without namespaces.

    The grades are the same as with namespaces, and the report says what was not shut off.
    """

    def __init__(self, course: Path, skeleton: str, folder: Path) -> None:
        self.out = folder / "out"
        (folder / "hidden").mkdir()
        (folder / "hidden/test_m2_1_more.py").write_text(HIDDEN)
        (folder / "absent").mkdir()
        folders = [
            hand_in(folder / "right", SHELF),
            hand_in(folder / "half", skeleton + HALF_RIGHT),
            hand_in(folder / "edits", skeleton + hostile.EDIT),
            folder / "absent",
        ]
        words = ["--hidden", str(folder / "hidden"), "--out", str(self.out), "--no-namespaces"]
        self.status = grade.main(arguments(course, *map(str, folders), *words))

    def results(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / name / "results.json").read_text())
        return found


@pytest.fixture(scope="module")
def few(course: Path, skeleton: str, tmp_path_factory: pytest.TempPathFactory) -> Few:
    return Few(course, skeleton, tmp_path_factory.mktemp("few"))


def test_results_are_what_gradescope_reads(few: Few) -> None:
    """The results have only the documented fields, with the documented types."""
    found = few.results("half")
    assert found.keys() <= {
        "score", "execution_time", "output", "visibility", "stdout_visibility", "extra_data",
        "tests", "leaderboard",
    }  # fmt: skip
    (test,) = found["tests"]
    assert test.keys() <= {
        "score", "max_score", "status", "name", "name_format", "number", "output",
        "output_format", "tags", "visibility", "extra_data",
    }  # fmt: skip
    assert isinstance(found["execution_time"], int) and test["status"] in ("passed", "failed")
    assert found["visibility"] in ("hidden", "after_due_date", "after_published", "visible")
    assert found["score"] == sum(t["score"] for t in found["tests"]) == 3.33
    assert (test["number"], test["max_score"]) == ("m2.1", 10)


def test_a_student_reads_why_and_not_what_is_hidden(few: Few) -> None:
    output = few.results("half")["tests"][0]["output"]
    assert "1 of 3 tests passed" in output and "a hidden test: failed" in output
    assert "test_a_full_shelf_refuses: failed" in output
    assert "gave no error; expected ValueError" in output
    assert "nobody_knows" not in output
    assert "nobody_knows" in (few.out / "half/junit.xml").read_text(), "the instructor needs it"


def test_what_was_not_run_is_said(few: Few) -> None:
    assert few.status == 1
    absent = few.results("absent")
    assert (
        absent["score"] == 0
        and "m2_mini/shelf.py: the file is not in the submission" in absent["output"]
    )
    assert "had access to: the network" in few.results("right")["output"]


def test_without_namespaces_edited_tests_are_as_they_were(few: Few) -> None:
    """A submission cannot write the tests if it runs as another user.

    If it runs as the user that grades, the edit is noticed.
    """
    right, edits = few.results("right"), few.results("edits")
    assert right["score"] == 10 and edits["score"] == 0
    assert edits["extra_data"]["suspect"] == ("other processes" in edits["output"])


def test_junit_has_each_test(few: Few) -> None:
    root = ElementTree.parse(few.out / "half/junit.xml").getroot()
    (suite,) = root.findall("testsuite")
    assert (suite.get("tests"), suite.get("failures"), len(suite.findall("testcase"))) == (
        "3", "2", 3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("import ctypes", "line {}: imports ctypes"),
        ("from _pytest import runner", "line {}: imports _pytest"),
        ("math.fsum = sum", "line {}: changes math.fsum, which belongs to another module"),
        ("setattr(math, NAME, sum)", "line {}: uses setattr() on math, which was imported"),
        ("os._exit(0)", "line {}: uses _exit"),
        ("getattr(os, 'kill')(1, 9)", "line {}: uses kill"),
        ("exec('1')", "line {}: uses exec"),
        ("class Same:\n    def __eq__(self, other): return True", "defines __eq__"),
    ],
)
def test_the_gate_names_line_and_reason(line: str, reason: str) -> None:
    text = f"{SHELF}{line}\n"
    (found,) = static_checks.problems(text, SHELF)
    assert reason.format(len(SHELF.splitlines()) + 1) in found
    assert static_checks.problems(text, text) == [], "a line of the released file is refused"


def test_the_gate_lets_work_pass(milestone: str) -> None:
    """The sources of the milestones pass, even compared with an empty released file."""
    wrong = {
        str(path): found
        for path in (ROOT / milestone).rglob("*.py")
        if (found := static_checks.problems(path.read_text(encoding="utf-8"), ""))
    }
    assert wrong == {}


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_link_is_not_followed(what: str, course: Path, tmp_path: Path) -> None:
    """A link could lead to the reference solution, which the grader may read."""
    folder = tmp_path / "linked"
    folder.mkdir()
    if what == "folder":
        (folder / "m2_mini").symlink_to(course / "m2_mini")
    else:
        (folder / "m2_mini").mkdir()
        (folder / SOURCE).symlink_to(course / SOURCE)
    prepared = submission.prepare("m2_mini", course, tmp_path / "template")
    taken = submission.take(folder, "linked", prepared)
    assert not taken.files and "is a link" in taken.refused[SOURCE][0]


@pytest.mark.parametrize("data", [b"\xff\xfe", b"#" * (submission.LARGEST + 1)])
def test_what_is_no_source_is_refused(data: bytes, course: Path, tmp_path: Path) -> None:
    (tmp_path / "odd/m2_mini").mkdir(parents=True)
    (tmp_path / "odd" / SOURCE).write_bytes(data)
    prepared = submission.prepare("m2_mini", course, tmp_path / "template")
    assert submission.take(tmp_path / "odd", "odd", prepared).refused[SOURCE]


def test_no_solution_is_in_the_tree(course: Path, tmp_path: Path) -> None:
    submission.prepare("m2_mini", course, tmp_path / "template")
    texts = [p.read_text() for p in (tmp_path / "template").rglob("*") if p.is_file()]
    assert not [text for text in texts if "the secret of put" in text]
    assert not (tmp_path / "template/m3_mini").exists(), "a higher milestone has the solutions too"


@pytest.mark.parametrize(
    ("claim", "how", "outcome"),
    [
        ({}, "exit status 0", "passed"),
        ({"token": "another"}, "exit status 0", "error"),
        ({"problems": ["torch.equal has been replaced"]}, "exit status 0", "error"),
        ({"finished": False}, "exit status 0", "error"),
        ({"collected": [["t.py::other"]]}, "exit status 0", "error"),
        ({"results": []}, "exit status 3", "error"),
        ({}, "timeout", "timeout"),
        (None, "signal 9", "crashed"),
    ],
)
def test_a_claim_counts_if_all_of_it_is_right(
    claim: dict[str, object] | None, how: str, outcome: str
) -> None:
    passed = asdict(Result("t.py::test", "passed"))
    sound = {
        "token": "secret", "collected": [["t.py::test"]], "results": [passed], "finished": True,
        "problems": [], "ended": "",
    }  # fmt: skip
    text = b"" if claim is None else json.dumps({**sound, **claim}).encode() + b"\n"
    assert judge("t.py::test", text, how, "secret", "").outcome == outcome
    if outcome == "passed":
        assert judge("t.py::test", text + text, how, "secret", "").outcome == "error", (
            "a claim that comes twice is accepted"
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no such folder"),
        ([".", "--milestone", "m9"], "there is no milestone 'm9'"),
        ([".", "--hidden", "nowhere"], "no such folder of hidden tests"),
    ],
)
def test_wrong_usage(
    words: list[str], message: str, course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grade.main(arguments(course, *words)) == 2
    assert message in capsys.readouterr().err


MASK_TEST = """
from types import SimpleNamespace
import torch
from m2_continuous.model_input import InputBuilder


def test_a_query_sees_its_own_past() -> None:
    builder = SimpleNamespace(dtype=torch.float32)
    mask = InputBuilder._causal_mask(builder, torch.tensor([[0, 1, 2]]), 3)
    expected = torch.ones(3, 3, dtype=torch.bool).tril()
    assert torch.equal(mask[0, 0] == 0, expected), "I2: a token sees what comes after it"
"""
MASK_RECORD = """[[exercise]]
id = "m2.1"
title = "Causal mask"
points = 10
hours = 1
summary = "Each row sees its own past only."
symbols = ["model_input.py:InputBuilder._causal_mask"]
tests = ["tests/exercises/test_m2_1.py"]
hints = ["Positions.", "Compare them.", "slots <= positions"]
"""


def test_on_a_real_milestone(tmp_path: Path) -> None:
    """With torch: the reference earns all points. A replaced comparison of tensors earns none."""
    root = tmp_path / "course"
    skip = shutil.ignore_patterns("__pycache__", "exercises*", "test_*", "mutants")
    for name in ("common", "m1_single", "m2_continuous", "tests", "milestones"):
        shutil.copytree(ROOT / name, root / name, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "tests/exercises").mkdir()
    (root / "tests/exercises/test_m2_1.py").write_text(MASK_TEST)
    (root / "milestones/m2_continuous/exercises.toml").write_text(MASK_RECORD)
    names = {"equal": hostile.OnRealMilestone.EQUAL, "operator": hostile.OnRealMilestone.OPERATOR}
    for name, text in names.items():
        shutil.copytree(root / "m2_continuous", tmp_path / name / "m2_continuous")
        with (tmp_path / name / "m2_continuous/model_input.py").open("a") as file:
            file.write(text)
    args = arguments(root, *(str(tmp_path / name) for name in names), str(root), "--seconds", "60")
    args.bare = False
    sheets = {sheet.name: sheet for sheet in grade.grade(args)}
    assert {name: sheet.points for name, sheet in sheets.items()} == {
        "equal": 0, "operator": 0, "course": 10,
    }  # fmt: skip
    assert {name: sheet.suspect for name, sheet in sheets.items()} == {
        "equal": True, "operator": True, "course": False,
    }  # fmt: skip
