"""A student's commands on a released tree of the miniature course: check, hint, reset, list."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from milestones.course import catalog
from milestones.course.student import check, failure_words, hint, put_back, reset, watch
from milestones.course.student import list as ladder
from milestones.course.student.progress import load_progress
from tests.conftest import ROOT
from tests.helpers import mini_course
from tests.helpers.mini_course import Say

PUT = """        if len(self.items) >= ROOM:
            raise ValueError("no room")
        self.items.append(item)
        return len(self.items)"""
ERROR = """        raise NotImplementedError(
            "m2.1: Shelf.put is yours to write; see "
            "milestones/m2_mini/README.md#m21-put-it-there"
        )"""


def write(tree: Path, body: str, old: str = ERROR) -> None:
    path = tree / "m2_mini/shelf.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, body))


# What a student has written in `put`, and what `check m2.1` says about it.
SHOWN: dict[str, tuple[str, list[str]]] = {
    "nothing": (ERROR, ["m2.1 is not written yet: Shelf.put", "README.md#m21-put-it-there"]),
    "a wrong value": (
        PUT.replace("return len(self.items)", "return 1"),
        [
            "test_items_are_counted fails", "called shelf.put(5) result 1 expected 2",
            "message I3: an item is lost", "I3 Nothing leaks. A request that is done",
            "failed 1 of 2 tests",
        ],
    ),
    "an error": (
        "        return self.boxes[item]",
        [
            "raised AttributeError: 'Shelf' object has no attribute 'boxes'",
            "your code m2_mini/shelf.py:23 in put",
        ],
    ),
    # Otherwise each test of the exercise would take its whole limit, one after the other.
    "an endless loop": (
        "        while True:\n            pass",
        [
            "test_items_are_counted does not end", "still running after 0.5 s",
            "1 test was not run after the test", "failed 1 of 2 tests",
            "your code m2_mini/shelf.py:2", "stacks thread 1 of 1", "in put tests/exercises",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_wrong_is_shown_in_words(tree: Path, say: Say, name: str) -> None:
    body, parts = SHOWN[name]
    write(tree, body)
    limit = ["--seconds", "0.5"] if "while" in body else []
    status, said = say(check, "m2.1", *limit)
    words = " ".join(said.split())
    assert status == 1 and not [part for part in parts if part not in words], words
    assert not re.search("Traceback|NotImplementedError|\x1b|m2.1 passes", said)
    assert load_progress(tree).passed == []


def test_a_traceback_is_shown_on_demand(tree: Path, say: Say) -> None:
    write(tree, SHOWN["a wrong value"][0])
    assert "AssertionError" in say(check, "m2", "--trace")[1]


def test_a_part_that_is_written_is_not_asked_for(tree: Path, say: Say) -> None:
    """`check` stops at the first exercise that fails. Another one may need it."""
    assert "not run" in say(check)[1]
    assert "m2.2 is not written yet: Shelf.total, largest\n" in say(check, "m2.2")[1]
    complete = mini_course.SHELF.replace("return max(shelf.items)", "raise NotImplementedError")
    (tree / "m2_mini/shelf.py").write_text(
        complete.replace("NotImplementedError", 'NotImplementedError("m2.2: largest is yours")')
    )
    assert "m2.2 is not written yet: largest\n" in say(check)[1]


def test_no_test_runs_for_what_is_not_written(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The syntax tree answers at once: for an exercise, and for one that it needs."""

    def said(exercise: str) -> str:
        assert mini_course.called(check, tree, exercise, runner=SimpleNamespace()) == 1
        return capsys.readouterr().out

    assert "m2.1 is not written yet: Shelf.put\n" in said("m2.1")
    put = 'raise NotImplementedError("m2.1: Shelf.put is yours to write")'
    (tree / "m2_mini/shelf.py").write_text(
        mini_course.SHELF.replace("return self._append(item)", put)
    )
    shown = said("m2.2")
    assert "m2.2 needs m2.1, which is not written yet\n" in shown
    assert "Count them all  5 points  not written" in shown and "hint m2.2" in shown
    assert load_progress(tree).failed == ["m2.1", "m2.2"]


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (
            "return Shelf.__init__(7)",
            "given code m2_mini/shelf.py:N in __init__, called by your put",
        ),
        ("return mine(item)", "your code m2_mini/shelf.py:N in mine"),
    ],
)
def test_given_code_that_fails_is_not_called_yours(
    tree: Path, say: Say, body: str, place: str
) -> None:
    """A function that the student adds is the student's own."""
    write(tree, f"        {body}")
    path = tree / "m2_mini/shelf.py"
    path.write_text(path.read_text() + "\n\ndef mine(item: int) -> float:\n    return item / 0\n")
    words = " ".join(say(check, "m2.1")[1].split())
    assert place in re.sub(r"py:\d+ in", "py:N in", words), words


def test_progress_is_made_and_remembered(tree: Path, say: Say) -> None:
    def state() -> str:
        line = next(line for line in say(ladder)[1].splitlines() if line.startswith("m2.1"))
        return line.partition("points")[2].strip()

    write(tree, PUT)
    assert state() == "not checked"
    status, said = say(check)
    assert status == 1 and "m2.2 is not written yet: Shelf.total, largest" in said
    assert "m2_mini: 1 of 2 exercises pass, 10 of 15 points" in said
    shown = say(ladder)[1]
    assert "10 of 15" in shown and "given" in shown
    assert re.search(r"m2.2 +Count them all +5 points +not written *\n", shown)
    conftest = (tree / "tests/conftest.py").read_text()
    (tree / "tests/conftest.py").write_text("import nonsense\n")
    say(check, "m2.1")  # the tests cannot be run: that is no result of the exercise
    assert state() == "passed" and load_progress(tree).passed == ["m2.1"]
    (tree / "tests/conftest.py").write_text(conftest)
    write(tree, "        return 0", old=PUT)
    say(check, "m2.1")
    assert state() == "failed" and load_progress(tree).passed == []
    (tree / "m2_mini/shelf.py").write_text(mini_course.SHELF)
    status, said = say(check)
    assert status == 0 and "All exercises pass: 15 points" in said and "15 of 15" in say(ladder)[1]


def test_a_syntax_error_has_a_caret(tree: Path, say: Say) -> None:
    write(tree, "        return (item")
    status, said = say(check)
    assert status == 1
    assert "m2_mini/shelf.py:23: '(' was never closed" in said
    assert "    return (item\n           ^" in said


def test_what_cannot_be_run_is_no_failure(tree: Path, say: Say) -> None:
    write(tree, PUT)
    (tree / "tests/conftest.py").write_text("import nonsense\n")
    status, said = say(check)
    assert status == 2 and "stopped with an error" in said and "nonsense" in said
    assert say(check, "m7")[0] == 2 and say(check, "m2.9")[0] == 2


def test_watching_survives_anything_saved(
    tree: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is first not written, then not valid Python, then right. Then comes Ctrl-C."""
    bodies = iter(["        return (item", PUT])
    last = [ERROR]

    def saved(folders: object) -> Iterator[None]:
        yield
        for body in bodies:
            write(tree, body, old=last[0])
            last[0] = body
            yield
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "changes", saved)
    status, said = say(check, "m2.1", "--watch")
    assert status == 0
    order = ["not written yet", "was never closed", "m2.1 passes"]
    assert [said.index(part) for part in order] == sorted(said.index(part) for part in order)


def test_a_change_is_seen_once(tmp_path: Path) -> None:
    """Two writes in quick succession are one change. Files other than sources do not count."""
    path = tmp_path / "a.py"
    edits = iter(
        [
            lambda: path.write_text("x = 1"),
            lambda: path.write_text("x = 12"),  # before the first write has settled
            lambda: None,
            lambda: (tmp_path / "a.txt").write_text("no"),
            lambda: path.unlink(),
            lambda: None,
        ]
    )

    def sleep(_: float) -> None:
        next(edits)()

    seen = watch.changes([tmp_path], sleep)
    assert [next(seen) for _ in range(3)] == [None] * 3
    with pytest.raises((StopIteration, RuntimeError)):
        next(seen)


def test_hints_come_one_by_one(tree: Path, say: Say) -> None:
    assert "no hint was shown yet" in say(hint, "m2.1", "--all")[1]
    for number, text in enumerate(catalog.find("m2.1", tree).hints, start=1):
        status, said = say(hint, "m2.1")
        assert status == 0 and f"hint {number} of 3" in said and text in said
    status, said = say(hint, "m2.1")
    assert status == 0 and "all 3 hints were shown" in said
    status, said = say(hint, "m2.1", "--all")
    assert status == 0 and all(f"hint {number} of 3" in said for number in (1, 2, 3))
    assert say(hint, "m2.9")[0] == 2


def test_undo_keeps_later_work_in_the_same_file(tree: Path, say: Say) -> None:
    path = tree / "m2_mini/shelf.py"
    assert say(reset, "m2.1", "--undo")[0] == 2  # it was never reset
    write(tree, PUT)
    say(reset, "m2.1")
    path.write_text(path.read_text() + "\n\nLATER = 1\n")
    status, said = say(reset, "m2.1", "--undo")
    assert status == 0 and "m2.1 is your last version again" in said
    assert PUT in path.read_text() and "LATER = 1" in path.read_text()
    assert "as in your last version" not in said
    assert say(reset, "m2.1", "--undo")[0] == 0 and ERROR in path.read_text()  # and back again


def test_reset_puts_one_exercise_back(tree: Path, say: Say) -> None:
    """Other edits of the file stay, and the student's version is kept in a backup."""
    path = tree / "m2_mini/shelf.py"
    write(tree, PUT)
    path.write_text(path.read_text().replace("import math", "") + "\n\nMINE = 1\n")
    mine = path.read_text()
    status, said = say(reset, "m2.1")
    assert status == 0 and "the text before is m2_mini/shelf.py.m2.1.bak" in said
    assert "imports and helpers that you have added stay" in said
    assert "python -m milestones reset m2.1 --undo\n" in said and "cp " not in said
    assert (tree / "m2_mini/shelf.py.m2.1.bak").read_text() == mine
    assert ERROR in path.read_text() and "MINE = 1" in path.read_text()
    assert say(reset, "m2.1") == (0, "m2.1 is in its starting state already\n")
    write(tree, PUT)
    assert "shelf.py.m2.1.bak.2" in say(reset, "m2.1")[1]


@pytest.mark.parametrize("symbol", ["put", "largest"])
def test_reset_brings_back_what_was_deleted(tree: Path, say: Say, symbol: str) -> None:
    path = tree / "m2_mini/shelf.py"
    start = path.read_text()
    exercise, qualified = {"put": ("m2.1", "Shelf.put"), "largest": ("m2.2", "largest")}[symbol]
    first, last = put_back.definitions(start)[qualified]
    lines = start.splitlines(keepends=True)
    path.write_text("".join(lines[: first - 1] + lines[last:]).rstrip() + "\n")
    assert say(reset, exercise)[0] == 0
    assert put_back.definitions(path.read_text()).keys() == put_back.definitions(start).keys()
    assert start.strip().splitlines()[-4:] == path.read_text().strip().splitlines()[-4:]


def test_reset_of_a_file_that_is_no_python(tree: Path, say: Say) -> None:
    write(tree, "        return (item")
    before = (tree / "m2_mini/shelf.py").read_text()
    status, said = say(reset, "m2.1")
    assert status == 2
    assert "cp milestones/m2_mini/start/shelf.py.txt m2_mini/shelf.py" in said
    assert (tree / "m2_mini/shelf.py").read_text() == before


def test_the_reference_cannot_be_reset(tmp_path: Path) -> None:
    root = mini_course.make(tmp_path)
    with pytest.raises(reset.ResetError, match="only one that `release` has made"):
        reset.reset(catalog.find("m2.1", root), root)


def test_the_lines_are_those_of_the_complete_milestone(tree: Path) -> None:
    """The student's tree has holes. The list counts what was there before the release."""
    size = ladder.size_of(tree, "m2_mini", "m1_mini")
    assert size.lines == len(mini_course.SHELF.splitlines()) + 1
    assert 0 < size.added + size.changed <= size.lines


def test_the_console_of_a_students_tree(tree: Path) -> None:
    """Run in a process, as by a student: the console has its commands, and examples in the help."""

    def console(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "milestones", *arguments],
            cwd=tree, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    shown = console("--help")
    for name in ("list", "check", "hint", "predict", "break", "measure", "reset", "doctor"):
        assert f"\n    {name} " in shown
    assert "release" not in shown and "bench" not in shown
    # The examples name the milestone of this tree.
    assert "for example:  python -m milestones check m2.2 --watch" in console("check", "--help")
    assert "milestones diff m1 m2\n" in console("diff", "--help")
    assert "hint 1 of 3" in console("hint", "m2.1")
    assert "there is no exercise m2.9; m2_mini has m2.1, m2.2" in console("hint", "m2.9")
    assert "given" in console("list")
    assert "invalid choice: 'grade'" in console("grade")


def test_a_reader_that_goes_away_is_no_error(tree: Path) -> None:
    """`python -m milestones diff m1 m2 | head` closes the pipe before all is written."""
    with subprocess.Popen(
        [sys.executable, "-m", "milestones", "diff", "m1", "m2"],
        cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as done:  # fmt: skip
        assert done.stdout is not None and done.stderr is not None
        done.stdout.close()
        assert done.stderr.read() == b"" and done.wait() == 141


def test_the_invariants_are_those_of_the_project() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for number, (name, _) in failure_words.INVARIANTS.items():
        assert f"**I{number} {name}.**" in page
    assert failure_words.invariants_in("I3: x, I5: y, BI4, I9") == [3, 5]


def test_what_a_failing_test_printed_is_shown(tree: Path, say: Say) -> None:
    write(tree, '        print("room for", item)\n' + SHOWN["a wrong value"][0])
    said = say(check, "m2.1")[1]
    assert "The end of what it printed:" in said and "room for 7" in said


def test_a_breakpoint_gets_a_terminal_on_demand(
    tree: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def kept(command: list[str], cwd: Path, check: bool) -> None:
        done = subprocess.run(
            command, cwd=cwd, check=check, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        shown.append(done.stdout)

    write(tree, "        breakpoint()\n" + SHOWN["a wrong value"][0])
    said = " ".join(say(check, "m2.1")[1].split())
    assert "breakpoint() has no terminal here; `check --debug` runs the test with one" in said
    monkeypatch.setattr(check, "subprocess", SimpleNamespace(run=kept))
    say(check, "m2.1", "--debug")
    assert "m2_mini/shelf.py" in shown[0] and "(Pdb)" in shown[0]
