"""`python -m milestones grade`: points, reports, and the files taken from a submission."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from milestones.course.testing.results import Result
from milestones.staff.grading import command as grade
from milestones.staff.grading import grader, submission
from milestones.staff.grading.answers import Questions, compare
from milestones.staff.grading.client import ForkServer
from milestones.staff.grading.exam import results_from
from milestones.staff.grading.limits import Heard, Limits
from milestones.staff.grading.upload import Upload
from tests.helpers.mini_course import SHELF
from tests.helpers.submissions import (
    SOURCE,
    Graded,
    arguments,
    hand_in,
    make_course,
    once,
    results,
    skeleton_of,
)

NEVER_FULL = """
def put(self, item):
    self.items.append(item)
    return len(self.items)
Shelf.put = put
"""
HIDDEN = """
from m2_mini.shelf import Shelf


def test_that_no_student_knows() -> None:
    shelf = Shelf()
    assert [shelf.put(1) for _ in range(4)] == [1, 2, 3]
"""


# Says what it finds among the tests, in a message that a student reads.
SPY = """
import pathlib
found = [p.name for p in pathlib.Path("tests").rglob("*hidden*")]
found += [p.read_text() for p in pathlib.Path("tests").rglob("test_m2_1_more.py")]
def put(self, item):
    raise KeyError(found)
Shelf.put = put
"""


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_course(tmp_path_factory.mktemp("course"))


class Few(Graded):
    """Four submissions with a hidden test."""

    def __init__(self, folder: Path) -> None:
        course = make_course(folder / "course")
        skeleton = skeleton_of(course)
        (folder / "hidden").mkdir()
        (folder / "hidden/test_m2_1_more.py").write_text(HIDDEN)
        (folder / "absent").mkdir()
        sources = {"right": SHELF, "half": skeleton + NEVER_FULL, "spy": skeleton + SPY}
        super().__init__(
            folder, sources, "--hidden", str(folder / "hidden"),
            course=course, paths=[folder / "absent"],
        )  # fmt: skip


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Few:
    return once(tmp_path_factory, "few", Few)


def test_results_are_what_gradescope_reads(few: Few) -> None:
    """The results have only the documented fields, with the documented types."""
    found = results(few.out / "half")
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
    output = results(few.out / "half")["tests"][0]["output"]
    assert "1 of 3 tests passed. 1 of 2 kinds of questions" in output
    assert "right kinds: items\n" in output and "wrong: a full shelf: put(" in output
    assert "a hidden test: failed" in output
    assert "test_a_full_shelf_refuses: failed" in output
    assert "gave no error; expected ValueError" in output
    assert "no_student_knows" not in output
    assert "no_student_knows" in (few.out / "half/junit.xml").read_text(), "the instructor needs it"


def test_what_was_not_run_is_said(few: Few) -> None:
    assert few.status == 1
    absent = results(few.out / "absent")
    assert absent["score"] == 0 and "m2_mini/shelf.py: the file is not there" in absent["output"]


def test_hidden_tests_are_not_where_visible_ones_run(few: Few) -> None:
    output = results(few.out / "spy")["tests"][0]["output"]
    assert "KeyError: []" in output, "the visible tests and the questions ran beside hidden tests"
    assert "no_student_knows" not in json.dumps(results(few.out / "spy"))


def test_junit_has_each_test(few: Few) -> None:
    root = ElementTree.parse(few.out / "half/junit.xml").getroot()
    (suite,) = root.findall("testsuite")
    assert (suite.get("tests"), suite.get("failures"), len(suite.findall("testcase"))) == (
        "3", "2", 3,
    )  # fmt: skip


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
    taken = submission.take(Upload("linked", folder), prepared)
    assert not taken.files and SOURCE in taken.refused


def test_a_huge_file_is_refused(course: Path, tmp_path: Path) -> None:
    hand_in(tmp_path / "odd", b"#" * (submission.LARGEST + 1))
    prepared = submission.prepare("m2_mini", course, tmp_path / "template")
    assert "larger" in submission.take(Upload("odd", tmp_path / "odd"), prepared).refused[SOURCE]


def test_no_solution_is_in_the_tree(course: Path, tmp_path: Path) -> None:
    submission.prepare("m2_mini", course, tmp_path / "template")
    texts = [p.read_text() for p in (tmp_path / "template").rglob("*") if p.is_file()]
    assert not [text for text in texts if "the secret of put" in text]
    assert not (tmp_path / "template/m3_mini").exists(), "a higher milestone has the solutions too"


def test_what_is_compiled_has_no_solution(course: Path, tmp_path: Path) -> None:
    """The reference compiles the tests for all submissions. Its own code stays out."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/test_m2_1_more.py").write_text(HIDDEN)
    prepared = submission.prepare("m2_mini", course, tmp_path, tmp_path / "hidden")
    with ForkServer(tmp_path, bare=True) as server:
        grader.Grader(server, prepared, Limits(), tmp_path, [], 0).set_papers(course)
    compiled = {path.name.partition(".")[0] for path in prepared.template.rglob("*.pyc")}
    assert {"questions", "test_m2_1"} <= compiled
    assert not {"shelf", "test_m2_1_more"} & compiled


@pytest.mark.parametrize(
    ("file", "text", "words", "reason"),
    [
        (
            "tests/exercises/test_m2_1.py",
            "def test_a() -> None:\n    assert 1 == 2\n",
            [],
            "1 == 2",
        ),
        (
            "tests/questions/m2_mini.py",
            "QUESTIONS = {'m2.1': (lambda chance: 1 / 0, 3)}",
            [],
            "Division",
        ),
        ("tests/questions/m2_mini.py", "QUESTIONS = {}", [], "no questions for exercise m2.1"),
        (SOURCE, SHELF + "\nx = bytearray(1 << 30)\n", ["--memory", "0.5"], "MemoryError"),
    ],
    ids=["a test", "an answer", "no questions", "memory"],
)
def test_what_the_reference_cannot_do_costs_no_student_a_point(
    file: str, text: str, words: list[str], reason: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The reference sits the exam first, within the same limits. The grader says what failed."""
    course = make_course(tmp_path / "course")
    (course / file).write_text(text)
    folder, out = hand_in(tmp_path / "right", SHELF), tmp_path / "out"
    assert grade.main(arguments(course, str(folder), "--out", str(out), *words)) == 3
    said = capsys.readouterr().err
    assert "m2.1" in said and reason in said
    assert not (out / "results.json").exists()


A, B, C = "t.py::a", "t.py::b", "t.py::c"
ENDED = {"ended": "pytest ended with 0"}


def passed(*names: str) -> list[Any]:
    return [{"result": asdict(Result(name, "passed"))} for name in names]


@pytest.mark.parametrize(
    ("said", "how", "outcomes"),
    [
        ([*passed(A, B, C), ENDED], "exit status 0", ["passed", "passed", "passed"]),
        (passed(A, B, C), "timeout", ["passed", "passed", "timeout"]),
        (passed(A), "timeout", ["passed", "timeout"]),
        (passed(A), "memory", ["passed", "crashed"]),
        (passed(A), "signal 9", ["passed", "crashed"]),
        ([*passed(A), ENDED], "exit status 0", ["passed"]),
        ([], "signal 9", ["crashed"]),
        ([ENDED], "exit status 3", ["error"]),
        ([{"result": asdict(Result("t.py", "error"))}, ENDED], "exit status 0", ["error"] * 3),
        ([*passed(A), *passed(A), *passed("u.py::x"), ENDED], "exit status 0", ["passed"]),
        (
            [{"result": {"node": A, "outcome": "perfect", "title": 1}}],
            "timeout",
            ["error", "timeout"],
        ),
        ([{"result": [[]]}], "exit status 0", ["error"]),
        ([{"result": None}], "exit status 0", ["error"]),
        ([{}], "timeout", ["error"]),
        ([[[[]]]], "exit status 0", ["error"]),
    ],
)
def test_what_a_process_says_is_read_with_care(
    said: list[Any], how: str, outcomes: list[str]
) -> None:
    """The tests that have no result here run in a new process."""
    lines = [json.dumps(line).encode() for line in said]
    results = results_from((A, B, C), Heard(lines, how, ""), Path("/tree"))
    assert [result.outcome for result in results] == outcomes
    assert [result.node for result in results] == [A, B, C][: len(results)]


DEEP, HUGE = "[" * 100_000, "9" * 5000


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", DEEP, HUGE, "[1e999, [], 1]", "[5, {}, 7]"])
def test_what_is_no_answer_is_not_right(text: str) -> None:
    questions = Questions(0, {5: [["a kind", "what?", 1.5]]})
    assert compare(questions, [text], "no answer").share == 0


@pytest.mark.parametrize(
    ("given", "right"),
    [
        (1.5, True), (1.50001, True), (10**400, False), ("1.5", False), (True, False),
        (None, False), (float("nan"), False), ([1.5], False),
    ],
)  # fmt: skip
def test_an_answer_is_right_if_it_is_equal(given: Any, right: bool) -> None:
    questions = Questions(0, {5: [["a kind", "what?", 1.5]]})
    text = json.dumps([5, [["a kind", "what?", given]], None])
    assert compare(questions, [text], "no answer").share == right


def test_a_kind_is_wrong_if_one_answer_is() -> None:
    """The points do not say how many answers are wrong. Those of another kind do not move."""
    right = {seed: [["a", "first", 1], ["b", "second", 2], ["a", "third", 3]] for seed in range(9)}
    texts = [json.dumps([seed, answers, None]) for seed, answers in right.items()]
    questions = Questions(0, right)
    assert compare(questions, texts, "no answer").share == 1
    texts[4] = json.dumps([4, [["a", "first", 1], ["a", "more", 3], ["b", "second", 9]], None])
    answers = compare(questions, texts, "no answer")
    assert answers.wrong == {"b": "second: 2 is expected, not 9"} and answers.share == 0.5
    assert (answers.right_answers, answers.all_answers) == (26, 27)
    texts[5] = json.dumps([5, right[5][:2], "ValueError: no"])
    answers = compare(questions, texts, "no answer")
    assert answers.wrong["a"] == "third: 3 is expected; ValueError: no" and answers.share == 0
    late = [json.dumps([seed, answers, "KeyError: late"]) for seed, answers in right.items()]
    assert compare(questions, late, "no answer").wrong == {"a": "KeyError: late"}


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
