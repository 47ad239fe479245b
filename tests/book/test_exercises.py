"""Exercises in a tab: tests run with what the worker unpacks, and a reader's zip can be graded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from milestones.book import exercise_pages
from milestones.book.exercise_files import IN_A_TAB, ExerciseFiles, exercises
from milestones.book.workbench import Work, Workbench
from tests.conftest import ROOT
from tests.course.conftest import tree as tree
from tests.helpers import mini_course
from tests.helpers.submissions import SOURCE, Graded, make_course
from tests.house.test_plain_data import PLAIN_EXERCISES

CALLS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from milestones.book import workbench
for name, *arguments in json.load(sys.stdin):
    if name == "check":
        said = []
        arguments.append(said.append)
    print("ANSWER", getattr(workbench, name)(*arguments))
"""
KV_CACHE = (ROOT / "m3_paged/kv_cache.py").read_text("utf-8")


@pytest.fixture(scope="module")
def files() -> ExerciseFiles:
    return ExerciseFiles()


@pytest.fixture(scope="module")
def tab(files: ExerciseFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a worker unpacks, and nothing else."""
    folder = tmp_path_factory.mktemp("tab")
    files.write(folder / "exercises.zip")
    with zipfile.ZipFile(folder / "exercises.zip") as archive:
        archive.extractall(folder)
    return folder


def called(folder: Path, *calls: tuple[str, ...]) -> list[Any]:
    """Call functions of the workbench in a Python without any package. Return the answers."""
    command = [sys.executable, "-I", "-S", "-B", "-c", CALLS, str(folder)]
    given = json.dumps(calls)
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [json.loads(line[7:]) for line in lines if line.startswith("ANSWER ")]


def report_of(folder: Path, name: str, text: str) -> str:
    """Return all words of the report on an exercise of m3's `kv_cache.py`."""
    [report] = called(folder, ("check", name, json.dumps({"m3_paged/kv_cache.py": text})))
    return " ".join(json.dumps(report, ensure_ascii=False).replace("\\n", " ").split())


def test_the_exercises_of_plain_data_are_in_the_book() -> None:
    plain = [name for name in PLAIN_EXERCISES if re.match(r"m\d\.", name)]
    assert plain == list(IN_A_TAB)
    assert [exercise.id for exercise in exercises()] == list(IN_A_TAB)


def test_a_solution_passes_and_a_skeleton_is_not_written(tab: Path) -> None:
    calls = []
    for exercise in exercises():
        names = {s for e in exercises() if e.milestone == exercise.milestone for s in e.sources}
        solved = {name: (ROOT / name).read_text("utf-8") for name in sorted(names)}
        calls += [
            ("check", exercise.id, json.dumps(solved)), ("check", exercise.id, json.dumps({})),
        ]  # fmt: skip
    states = [report["state"] for report in called(tab, *calls)]
    assert states == ["passed", "not written"] * len(exercises())


def test_what_is_wrong_is_said_in_the_words_of_check(tab: Path) -> None:
    given = "self.pages_for(num_tokens) - len(self.table"
    assert given in KV_CACHE
    wrong = KV_CACHE.replace(given, "num_tokens // self.page_size + 1 - len(self.table")
    words = report_of(tab, "m3.1", wrong)
    assert '"called", "' in words and '"result", "' in words and " tests pass" in words
    words = report_of(tab, "m3.1", KV_CACHE.replace("if missing > 0:", "if missing > 0"))
    assert "m3_paged/kv_cache.py:" in words and "^" in words
    cut = files_text(tab, "m3_paged/kv_cache.py")
    assert "m3.1 is not written yet: KVCacheManager.allocate_slots" in report_of(tab, "m3.1", cut)


def files_text(folder: Path, name: str) -> str:
    milestone, _, inside = name.partition("/")
    return (folder / f"tree/milestones/{milestone}/start/{inside}.txt").read_text("utf-8")


def test_a_test_that_does_not_end_is_named(tab: Path) -> None:
    """The page ends the worker, and asks another one for the report of what it has heard."""
    nodes = [f"tests/exercises/test_m3_1.py::test_{name}" for name in "abc"]
    done = {"node": nodes[0], "outcome": "passed", "seconds": 0.1, "title": "", "printed": ""}
    events = [
        {"event": "collected", "nodes": nodes, "plain": True},
        {"event": "result", "result": {**done, "failure": None}},
        {"event": "start", "node": nodes[1]},
    ]
    [report] = called(tab, ("report", "m3.1", "{}", json.dumps(events)))
    assert report["head"] == "test_b does not end" and "10 s" in str(report["facts"])
    assert "1 test was not run" in report["rest"] and report["tests"] == "1 of 3 tests pass"
    [report] = called(tab, ("report", "m3.1", "{}", "[]"))
    assert "no test was started" in report["head"]


def test_text_of_an_older_course_is_shown_beside_the_new_one(tab: Path) -> None:
    old = KV_CACHE.replace("class PageTable:", "class OldTable:")
    [found] = called(tab, ("renewed", "m3_paged", "m3_paged/kv_cache.py", old))
    assert "class PageTable:" in found["text"] and "+class PageTable:" in found["diff"]
    assert "missing = self.pages_for(num_tokens)" in found["text"], "the reader's function"
    assert not found["error"]
    [found] = called(tab, ("renewed", "m3_paged", "m3_paged/kv_cache.py", "def (\n"))
    assert "-def (" in found["diff"] and found["error"]


def test_an_exercise_begins_again_without_the_others(tab: Path) -> None:
    cache = (ROOT / "m4_radix/radix_cache.py").read_text("utf-8")
    [found] = called(tab, ("reset", "m4.1", json.dumps({"m4_radix/radix_cache.py": cache})))
    text = found["files"]["m4_radix/radix_cache.py"]
    assert "m4.1: RadixCache._walk is yours" in text and "m4.2: " not in text


def test_the_zip_of_a_reader_is_graded(tree: Path, tmp_path: Path) -> None:
    work = Work(
        {SOURCE: mini_course.SHELF}, {SOURCE: ["an earlier text"]},
        {"passed": ["m2.1"], "failed": [], "hints": {"m2.1": 2}},
        {"m2.1": {"Prediction": "three"}},
    )  # fmt: skip
    packed = tmp_path / "m2_mini.zip"
    packed.write_bytes(Workbench(tree).packed("m2_mini", work))
    with zipfile.ZipFile(packed) as archive:
        assert [name for name in archive.namelist() if name.endswith(".py")] == [SOURCE]
        assert archive.read(f"{SOURCE}.bak.1") == b"an earlier text"
        assert b"### Prediction\n\nthree\n" in archive.read("ANSWERS.md")
        assert json.loads(archive.read(".ladder/progress.json"))["hints"] == {"m2.1": 2}
    course = make_course(tmp_path / "whole")
    graded = Graded(tmp_path, {}, course=course, paths=[packed])
    assert graded.status == 0
    [sheet] = graded.sheets.values()
    assert sheet.points == sum(mark.exercise.points for mark in sheet.marks) > 0


def test_a_page_asks_before_it_answers(files: ExerciseFiles) -> None:
    for exercise in exercises():
        text = exercise_pages.page_text(exercise)
        assert text.index("**Predict.**") < text.index("Answer</summary>")
        assert (
            text.index("**Run.**")
            < text.index(exercise_pages.EDITOR)
            < text.index("hint</summary>")
        )
        html = exercise_pages.html_of(exercise, files)
        assert html.count("<pre data-file=") == len(exercise.sources)
