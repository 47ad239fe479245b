"""`python -m milestones grade`: hostile submissions earn nothing and disturb no honest one."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from milestones.staff.grading import command as grade
from milestones.staff.grading import grader
from tests.helpers import hostile
from tests.helpers.mini_course import SHELF
from tests.helpers.submissions import arguments, hand_in, make_course, once, skeleton_of

pytestmark = pytest.mark.thorough("some thirty hostile submissions, each in a process")

HONEST = "zoe"


class Listener(threading.Thread):
    """Listens on a port of this machine, and keeps what connections send."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.heard: list[bytes] = []
        self.start()

    def run(self) -> None:
        while True:
            try:
                self.heard.append(self.socket.accept()[0].recv(100))
            except OSError:
                return


class Hostile:
    """Grades all hostile submissions and an honest one, side by side."""

    def __init__(self, folder: Path) -> None:
        course = make_course(folder / "course")
        skeleton = skeleton_of(course)
        self.outside = folder / "outside"
        self.outside.mkdir()
        self.outside.chmod(0o777)
        listener = Listener()
        names = {
            "REFERENCE": repr(str(course)), "OUTSIDE": repr(str(self.outside / "file")),
            "PORT": str(listener.port),
        }  # fmt: skip
        given = "\n" + "".join(f"{name} = {value}\n" for name, value in names.items())
        self.before = snapshot(course)
        folders = [
            hand_in(folder / name.lower(), skeleton + given + text)
            for name, text in vars(hostile).items()
            if name.isupper() and isinstance(text, str)
        ]
        folders += [
            hand_in(folder / name.lower(), data) for name, data in hostile.encoded(skeleton).items()
        ]
        folders.append(hand_in(folder / HONEST, SHELF))
        words = ["--jobs", "2", "--seconds", "6"]
        with pytest.MonkeyPatch.context() as patch:  # some seeds fill a shelf, and some do not
            patch.setattr(grader, "draw_seeds", lambda: tuple(range(12)))
            sheets = grade.grade(arguments(course, *map(str, folders), *words))
        self.sheets = {sheet.name: sheet for sheet in sheets}
        listener.socket.close()
        self.heard = listener.heard
        self.after = snapshot(course)
        self.missing = " ".join(self.sheets[HONEST].not_run)

    def failures(self, name: str) -> str:
        results = [r for mark in self.sheets[name].marks for r in mark.results]
        return " ".join(f"{r.failure.kind} {r.failure.message}" for r in results if r.failure)


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def exam(tmp_path_factory: pytest.TempPathFactory) -> Hostile:
    return once(tmp_path_factory, "hostile", Hostile)


# A submission that is right in part earns a part. The others earn nothing.
EARNS_IN_PART = {"hang", "remember"}
NAMES = [name.lower() for name, text in vars(hostile).items() if name.isupper()]
NAMES += [name.lower() for name in hostile.encoded("")]
# These make pytest, or the process, report that all tests have passed.
LIARS = ["runner", "plugin", "conftest", "equal", "spell", *hostile.encoded("")]


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_submission_earns_nothing(name: str, exam: Hostile) -> None:
    sheet = exam.sheets[name]
    if name == "read" and "the reference too" in exam.missing:
        return  # it may have read the reference; then the report must say that this was possible
    results = [
        (r.node, r.outcome, r.failure and r.failure.message) for m in sheet.marks for r in m.results
    ]
    assert sheet.points <= 5 if name in EARNS_IN_PART else sheet.points == 0, results
    assert [len(mark.results) for mark in sheet.marks] == [2], "a test has no result"
    assert [mark.answers.asked for mark in sheet.marks] == [12], "it was not asked"


def test_the_honest_one_beside_them_is_not_disturbed(exam: Hostile) -> None:
    assert exam.sheets[HONEST].points == 10
    assert exam.sheets[HONEST].marks[0].status == "passed"
    assert exam.after == exam.before, "the course was written to"


def test_a_hang_is_found_once_and_shows_where(exam: Hostile) -> None:
    """Its second test hangs. The answers that do not hang are right."""
    mark = exam.sheets["hang"].marks[0]
    first, second = mark.results
    assert (first.outcome, second.outcome) == ("passed", "timeout")
    assert second.failure is not None and (second.failure.where or "").endswith("in put")
    assert "m2_mini/shelf.py" in (second.failure.where or ""), "the student's own line"
    assert 0 < mark.answers.right < mark.answers.asked
    assert "in put" in mark.answers.wrong


def test_what_answers_nothing_is_not_tested(exam: Hostile) -> None:
    """It has no points, and each of its tests might take as long as the questions."""
    (mark,) = exam.sheets["deaf"].marks
    assert [result.outcome for result in mark.results] == ["error", "error"]
    assert "answering the first question does not end, at m2_mini" in exam.failures("deaf")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("leave", "ended before the test did (exit status 0)"),
        ("crash", "(signal 11)"),
        ("stop", "SystemExit"),
        ("memory", "MemoryError"),
        ("disk", "File too large"),
        ("debug", "a breakpoint() is left in the code"),
        ("hidden_memory", "PermissionError"),
    ],
)
def test_the_report_says_what_happened(name: str, words: str, exam: Hostile) -> None:
    assert words in exam.failures(name)


@pytest.mark.parametrize("name", LIARS)
def test_wrong_answers_that_pass_tests_are_shown_to_a_person(name: str, exam: Hostile) -> None:
    sheet = exam.sheets[name]
    assert sheet.marks[0].passed == 2, "this submission does not reach its aim: it proves nothing"
    assert sheet.suspect and not exam.sheets[HONEST].suspect


def test_nothing_gets_out_or_it_is_said(exam: Hostile) -> None:
    """If the kernel cannot shut a process off, the report of each submission says so."""
    assert not list(exam.outside.iterdir()) or "other files" in exam.missing
    assert not exam.heard or "the network" in exam.missing
