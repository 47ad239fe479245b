"""`python -m milestones grade`: hostile submissions earn nothing and disturb no honest one.

No submission holds what no limit counts, or sees what is not its own. What it says does not write
on a screen. Each case is a submission of `hostile` or of `hostile_kernel`.
"""

from __future__ import annotations

import re
import socket
import threading
from pathlib import Path

import pytest

from tests.helpers import hostile, hostile_kernel
from tests.helpers.mini_course import SHELF
from tests.helpers.submissions import Graded, make_course, once, skeleton_of

pytestmark = pytest.mark.thorough("some forty hostile submissions, each in a process")

HONEST = "zoe_of_another_group"
KERNEL = [name for name in vars(hostile_kernel) if name.isupper()]
TEXTS = {
    name: text
    for name, text in {**vars(hostile), **vars(hostile_kernel)}.items()
    if name.isupper() and name != "RULES"
}
# A submission that is right in part earns a part. The others earn nothing.
EARNS_IN_PART = {"HANG", "REMEMBER", "EQUAL"}
# These make pytest, or the process, report that all tests have passed.
LIARS = ["REPORT", "CONFTEST", "EQUAL"]


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


class Hostile(Graded):
    """All hostile submissions and an honest one, side by side, with little memory for each."""

    def __init__(self, folder: Path) -> None:
        course = make_course(folder / "course")
        self.outside = folder / "outside"
        self.outside.mkdir()
        self.outside.chmod(0o777)
        listener = Listener()
        secrets = [HONEST, "the secret of put", f"{course}/m2_mini"]
        names = {
            "REFERENCE": repr(str(course)), "OUTSIDE": repr(str(self.outside / "file")),
            "PORT": listener.port,
            "SECRETS": [f"[{secret[0]}]{secret[1:]}" for secret in secrets],  # match not themselves
        }  # fmt: skip
        given = "".join(f"{name} = {value}\n" for name, value in names.items())
        given = f"{skeleton_of(course)}\n{hostile.RULES}\n{given}"
        before = snapshot(course)
        sources = {name: given + text for name, text in TEXTS.items()}
        super().__init__(folder, {**sources, HONEST: SHELF}, "--memory", "0.5", course=course)
        listener.socket.close()
        self.heard = listener.heard
        self.unchanged = snapshot(course) == before
        self.missing = " ".join(self.sheets[HONEST].not_run)

    def failures(self, name: str) -> str:
        results = [r for mark in self.sheets[name].marks for r in mark.results]
        return " ".join(f"{r.failure.kind} {r.failure.message}" for r in results if r.failure)


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def exam(tmp_path_factory: pytest.TempPathFactory) -> Hostile:
    return once(tmp_path_factory, "hostile", Hostile)


@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_submission_earns_nothing(name: str, exam: Hostile) -> None:
    """It does not reach its aim, unless the report says that this was possible. An escape sequence
    in what it says could delete or replace what is on the screen."""
    sheet, output = exam.sheets[name], exam.output(name)
    assert "Held: " not in output or exam.missing, output
    assert re.sub(r"[\n\t]", "", output).isprintable()
    assert [len(mark.results) for mark in sheet.marks] == [2], "a test has no result"
    assert [len(mark.answers.kinds) for mark in sheet.marks] == [2], "it was not asked"
    if name in KERNEL:
        assert [mark.broken for mark in sheet.marks] == [None], "the exam itself failed"
    if name != "READ" or "the reference too" not in exam.missing:
        assert sheet.points <= (5 if name in EARNS_IN_PART else 0), output


def test_the_honest_one_beside_them_is_not_disturbed(exam: Hostile) -> None:
    assert exam.sheets[HONEST].points == 10
    assert exam.sheets[HONEST].marks[0].status == "passed"
    assert exam.unchanged, "the course was written to"


def test_a_hang_is_found_once_and_shows_where(exam: Hostile) -> None:
    """Its second test hangs. The answers that do not hang are right."""
    mark = exam.sheets["HANG"].marks[0]
    first, second = mark.results
    assert (first.outcome, second.outcome) == ("passed", "timeout")
    assert second.failure is not None and (second.failure.where or "").endswith("in put")
    assert "m2_mini/shelf.py" in (second.failure.where or ""), "the student's own line"
    assert mark.answers.wrong.keys() == {"a full shelf"}
    assert "in put" in mark.answers.wrong["a full shelf"]


def test_what_answers_nothing_is_not_tested(exam: Hostile) -> None:
    """It has no points, and each of its tests might take as long as the questions."""
    (mark,) = exam.sheets["DEAF"].marks
    assert [result.outcome for result in mark.results] == ["error", "error"]
    assert "answering the first question does not end, at m2_mini" in exam.failures("DEAF")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LEAVE", "ended before the test did (exit status 0)"),
        ("CRASH", "(signal 11)"),
        ("STOP", "SystemExit"),
        ("MEMORY", "MemoryError"),
        ("DISK", "File too large"),
        ("DEBUG", "a breakpoint() is left in the code"),
        ("HIDDEN_MEMORY", "PermissionError"),
        ("PAGE_TABLES", "memory"),
    ],
)
def test_the_report_says_what_happened(name: str, words: str, exam: Hostile) -> None:
    assert words in exam.failures(name) or (name == "PAGE_TABLES" and exam.missing)


@pytest.mark.parametrize("name", LIARS)
def test_wrong_answers_that_pass_tests_are_shown_to_a_person(name: str, exam: Hostile) -> None:
    sheet = exam.sheets[name]
    assert sheet.marks[0].passed == 2, "this submission does not reach its aim: it proves nothing"
    assert sheet.suspect and not exam.sheets[HONEST].suspect


def test_nothing_gets_out_or_it_is_said(exam: Hostile) -> None:
    """If the kernel cannot shut a process off, the report of each submission says so."""
    assert not list(exam.outside.iterdir()) or "other files" in exam.missing
    assert not exam.heard or "the network" in exam.missing
