"""`python -m milestones grade` with many submissions: uploads, names, interrupts, exit statuses."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from milestones.staff.grading import command as grade
from milestones.staff.grading import grade_files, sandbox, upload
from milestones.staff.grading.answers import seed_of, seeds_of
from milestones.staff.grading.grader import Grader
from tests.helpers.mini_course import SHELF
from tests.helpers.submissions import (
    SOURCE,
    Graded,
    arguments,
    hand_in,
    make_course,
    once,
    results,
    rows,
    skeleton_of,
    zipped,
)


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_course(tmp_path_factory.mktemp("course"))


LONG = """
def put(self, item):
    raise KeyError("x" * 2_000_000 + "\\ud800")
Shelf.put = put
"""
USES_HELPER = SHELF.replace("import math", "import math\nfrom . import helper\nhelper.WORKS\n")


class Many(Graded):
    """Uploads of all kinds, and what was left in the folder by mistake."""

    def __init__(self, folder: Path) -> None:
        course = make_course(folder / "course")
        given = folder / "given"
        sources: dict[str, str | bytes] = {
            "large": SHELF + "# x\n" * 200_000, "long": skeleton_of(course) + LONG,
            "latin": b"# coding: latin-1\n# \xe9\n" + SHELF.encode(), "helper": USES_HELPER,
            "nested/homework/of week 2": SHELF, "changed": SHELF, os.fsdecode(b"caf\xe9"): SHELF,
            "[red] closed": SHELF,
        }  # fmt: skip
        for name, text in sources.items():
            hand_in(given / name, text)
        (given / "helper/m2_mini/helper.py").write_text("WORKS = True\n")
        (given / "flat").mkdir()
        (given / "flat/shelf.py").write_text(SHELF)
        (given / "changed/tests").mkdir()
        (given / "changed/tests/conftest.py").write_text("x = 1\n")
        (given / "[red] closed" / SOURCE).chmod(0)
        (given / "notes.txt").write_text("grade these, please")
        (given / "broken.zip").write_bytes(b"PK\x03\x04 no zip file")
        super().__init__(folder, {}, course=course, paths=sorted(given.iterdir()))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Many:
    return once(tmp_path_factory, "many", Many)


def test_honest_submissions_get_all_points(many: Many) -> None:
    points = {row["submission"]: float(row["total"]) for row in rows(many.out)}
    assert points.pop("long") == 0
    if os.geteuid() != 0:  # root can read every file
        assert points.pop("[red] closed") == 0
    assert set(points.values()) == {10.0}, points
    assert len(rows(many.out)) == 9, "one line for each submission, whatever its name is"


def test_a_long_message_is_a_failure_and_no_more(many: Many) -> None:
    grade = results(many.out / "long")
    assert not grade["extra_data"]["suspect"]
    output = grade["tests"][0]["output"]
    assert "KeyError" in output and "xxx ... xxx" in output and len(output) < 50_000


def test_what_was_ignored_is_said(many: Many) -> None:
    assert (
        "tests/conftest.py was changed, and this change is not graded"
        in (results(many.out / "changed")["output"])
    )
    kept = many.out / "helper/files/m2_mini/helper.py"
    assert kept.read_text() == "WORKS = True\n", "a person can read what was graded"
    assert "helper.py was added by the student" in results(many.out / "helper")["output"]
    assert "found in homework/of week 2/m2_mini" in results(many.out / "nested")["output"]
    assert "not in m2_mini" in results(many.out / "flat")["output"]


def test_downloads_of_all_submissions(course: Path, tmp_path: Path) -> None:
    """Canvas has a zip file for each student, Moodle and Gradescope have a folder."""
    one = zipped(tmp_path / "one.zip", {f"work/{SOURCE}": SHELF})
    two = zipped(tmp_path / "two.zip", {"shelf.py": SHELF})
    canvas = zipped(tmp_path / "canvas.zip", {"anna_1_2_m2.zip": one, "bob_3_4_m2.zip": two})
    moodle = zipped(
        tmp_path / "moodle.zip",
        {f"Cy_5_assignsubmission_file_/{SOURCE}": SHELF, "Di_6_assignsubmission_file_/m2.zip": one},
    )
    scope = zipped(
        tmp_path / "scope.zip",
        {
            f"export/submission_7/{SOURCE}": SHELF, "export/submission_8/shelf.py": SHELF,
            "export/submission_metadata.yml": "x: 1",
        },
    )  # fmt: skip
    out = tmp_path / "out"
    words = [*map(str, (canvas, moodle, scope, one)), "--out", str(out), "--jobs", "2"]
    assert grade.main(arguments(course, *words)) == 0
    assert {row["submission"]: row["m2.1"] for row in rows(out)} == dict.fromkeys(
        [
            "canvas-anna_1_2_m2", "canvas-bob_3_4_m2", "moodle-Cy_5_assignsubmission_file_",
            "moodle-Di_6_assignsubmission_file_", "scope-submission_7", "scope-submission_8", "one",
        ],
        "10.0",
    )  # fmt: skip


def test_a_zip_file_that_is_too_large_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "LARGEST_ZIP", 100)
    bomb = zipped(tmp_path / "bomb.zip", {SOURCE: "x" * 200})
    sound = zipped(tmp_path / "sound.zip", {SOURCE: SHELF[:50], "../../evil.py": ""})
    (tmp_path / "scratch").mkdir()
    uploads = upload.Uploads("m2_mini", ["shelf.py"], tmp_path / "scratch")
    bad, good = uploads.find([bomb, sound])
    assert "too large" in bad.problem and not good.problem
    assert not [
        p for p in tmp_path.parent.rglob("evil.py") if tmp_path / "scratch" not in p.parents
    ]


class Interrupting:
    """Sends a signal to this process when the first grade has been saved."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.save = grade_files.save

    def __call__(self, *arguments: Any) -> None:
        self.save(*arguments)
        os.kill(os.getpid(), self.number)


@pytest.mark.thorough("three gradings of four submissions")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_resumed(
    number: signal.Signals, course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folders = [hand_in(tmp_path / "given" / name, SHELF) for name in "abcd"]
    out = tmp_path / "out"
    args = arguments(course, *map(str, folders), "--out", str(out), "--jobs", "1", "--resume")
    with monkeypatch.context() as patch:
        patch.setattr(grade_files, "save", Interrupting(number))
        assert grade.main(args) == 128 + number
    kept = [path.parent.name for path in out.glob("*/results.json")]
    assert len(kept) == 1, "the grade that was there when the signal came must be there"
    assert "interrupted" in capsys.readouterr().err
    assert grade.main(args) == 0
    assert capsys.readouterr().err.count("points") == 3, "the grade that is there is kept"
    assert [row["submission"] for row in rows(out)] == ["a", "b", "c", "d"]
    assert {row["total"] for row in rows(out)} == {"10.0"}
    hand_in(tmp_path / "new", skeleton_of(course))
    shutil.copyfile(tmp_path / "new" / SOURCE, folders[0] / SOURCE)
    assert grade.main(args) == 0
    assert [float(row["total"]) for row in rows(out)] == [0, 10, 10, 10], "a is graded again"


@pytest.mark.thorough("three gradings")
def test_a_submission_graded_later_gets_the_same_questions(
    course: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folders = tmp_path / "out", [hand_in(tmp_path / name, SHELF) for name in "abc"]
    words = ["--out", str(out), "--resume"]
    assert grade.main(arguments(course, *map(str, folders[:2]), *words)) == 0
    seed = results(out / "a")["extra_data"]["seed"]
    assert (out / grade_files.SEED).stat().st_mode & 0o77 == 0
    assert f"the seed of the questions: {seed}" in capsys.readouterr().out
    assert grade.main(arguments(course, *map(str, folders), *words)) == 0
    assert [results(out / name)["extra_data"]["seed"] for name in "abc"] == [seed] * 3
    assert grade.main(arguments(course, str(folders[0]), *words, "--seed", "5")) == 2
    assert f"have seed {seed}" in capsys.readouterr().err
    assert grade.main(arguments(course, *map(str, folders), "--out", str(out))) == 0
    assert results(out / "a")["extra_data"]["seed"] != seed, "a new run has new questions"


def test_a_seed_names_the_questions(course: Path, tmp_path: Path) -> None:
    """The same seed has the same questions, and another exercise has others."""
    args = arguments(course, str(hand_in(tmp_path / "a", SHELF)), "--seed", "0")
    batch = grade.Batch(args)
    batch.run()
    assert batch.seed == 0 and batch.grades["a"]["extra_data"]["seed"] == 0
    assert seeds_of(seed_of(0, "m2.1"), 3) == seeds_of(seed_of(0, "m2.1"), 9)[:3]
    assert len({seed_of(batch, name) for batch in range(3) for name in ("m2.1", "m2.2")}) == 6


def points_of(args: argparse.Namespace) -> list[float]:
    batch = grade.Batch(args)
    batch.run()
    return [sheet.points for sheet in batch.sheets.values()]


@pytest.mark.thorough("two graders that import torch")
def test_two_graders_at_once(course: Path, tmp_path: Path) -> None:
    """The kernel counts processes for each user: two exams must not share one."""
    folders = [hand_in(tmp_path / name, SHELF) for name in "ab"]
    args = arguments(course, *map(str, folders), "--jobs", "2")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as graders:
        assert list(graders.map(points_of, [args, args])) == [[10.0, 10.0]] * 2
    assert len({sandbox.new_user() for _ in range(100)}) == 100


def test_a_failure_of_the_grader_costs_one_grade_and_is_told_apart(
    course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folders = [hand_in(tmp_path / name, SHELF) for name in ("a", "[red] b")]
    sheet = Grader.sheet

    def fails(self: Grader, student: Any) -> Any:
        if student.name == "a":
            raise MemoryError("no memory")
        return sheet(self, student)

    monkeypatch.setattr(Grader, "sheet", fails)
    args = arguments(course, *map(str, folders), "--out", str(tmp_path / "out"))
    assert grade.main(args) == 3
    assert [row["submission"] for row in rows(tmp_path / "out")] == ["[red] b"]
    said = capsys.readouterr().out
    assert "a: the grader failed: MemoryError: no memory" in said
    assert "[red] b" in said, "square brackets are no colors"


def test_a_place_that_cannot_be_written_is_found_first(
    course: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("a file")
    folder = hand_in(tmp_path / "a", SHELF)
    assert grade.main(arguments(course, str(folder), "--out", str(tmp_path / "out"))) == 2
    assert "points" not in capsys.readouterr().err


def test_code_never_runs_as_root(
    course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Without namespaces, root's own Python cannot be used by another user."""
    folder = hand_in(tmp_path / "a", SHELF)
    monkeypatch.setattr(sandbox, "_open_to_others", lambda path: False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sandbox, "LINUX", True)
    monkeypatch.setattr(sandbox, "_unshare", lambda: None)
    assert grade.main(arguments(course, str(folder))) == 2
    assert "graded code would run as root" in capsys.readouterr().err


@pytest.mark.thorough("it waits for a time limit")
def test_an_endless_import_costs_one_time_limit(course: Path, tmp_path: Path) -> None:
    loops = SHELF + "\nwhile True:\n    pass\n"
    sheet = Graded(tmp_path, {"loops": loops}, "--seconds", "3", course=course).sheets["loops"]
    (reason,) = sheet.marks[0].refused
    assert sheet.points == 0 and "importing the code does not end, at m2_mini/shelf.py:" in reason
    assert sheet.marks[0].results[0].outcome == "error", "its tests were not run"
