"""What a tab runs for an exercise: the course's own tests on the reader's code, and the zip.

It is `python -m milestones check` in one process and in plain Python. The page ends the worker if a
test does not end, and then asks a new worker for the `report` of what was heard so far.

A tree is a student's tree, as `exercise_files.tree` makes it. The files of the reader come from the
page with each call: path from the root, and text.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import io
import json
import os
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..chain import place
from ..course.catalog import find, load
from ..course.exercise import Exercise
from ..course.release.cut import still_cut
from ..course.student.answers_file import title_of, write
from ..course.student.attempt import Attempt, not_written
from ..course.student.own_code import caller_of
from ..course.student.progress import Progress, save_progress
from ..course.student.put_back import ResetError, definitions, put_back
from ..course.student.watch import syntax_error
from ..course.testing.results import Failure, Result, Run, result_of
from ..course.testing.supervised_run import MESSAGES, SECONDS_PLAIN
from .report import Json, report_of, syntax_report, unwritten_report

TREE = Path(__file__).resolve().parents[2] / "tree"
OPTIONS = (
    "-q", "--noconftest", "--capture=sys", "--color=no", "-p", "no:cacheprovider",
    "-p", "no:faulthandler", "-c", os.devnull,
)  # fmt: skip
OF_A_TREE = ("common", "tests", "m1_", "m2_", "m3_", "m4_", "m5_")
EPOCH = (1980, 1, 1, 0, 0, 0)  # the date of each file in the zip
Files = dict[str, str]
Emit = Callable[[Json], None]


@dataclass
class Work:
    """What a reader takes along: the files, earlier versions of them, progress and answers.

    answers: the words for each part ("Prediction") of each exercise.
    """

    files: Files
    earlier: dict[str, list[str]] = field(default_factory=dict)
    progress: Json = field(default_factory=dict)
    answers: dict[str, dict[str, str]] = field(default_factory=dict)


class Workbench:
    """Checks the exercises of a tree."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree

    def check(self, name: str, files: Files, emit: Emit) -> Json:
        """Run the tests of an exercise. Emits the events of the tests, and returns the report."""
        exercise = self._begin(name, files)
        if error := syntax_error(self.tree, exercise.milestone):
            return syntax_report(error)
        own = load(exercise.milestone, self.tree, strict=False)
        if absent := not_written(exercise, own, self.tree):
            cut = still_cut(exercise, self.tree)
            return unwritten_report(Attempt(exercise, unwritten=cut, absent=absent))
        events = list[Json]()

        def heard(event: Json) -> None:
            events.append(event)
            emit(event)

        heard({"event": "finished", **self._run(exercise, heard)})
        return self.report(name, files, events)

    def report(self, name: str, files: Files, events: list[Json]) -> Json:
        """Return the report for the events of a run. The last test did not end if it must end."""
        exercise = self._begin(name, files)
        own, run = load(exercise.milestone, self.tree, strict=False), run_of(events)
        first = run.first_failure
        caller = caller_of(first.failure if first else None, own, self.tree)
        return report_of(Attempt(exercise, run, still_cut(exercise, self.tree), caller))

    def reset(self, name: str, files: Files) -> Files:
        """Return the files of an exercise with its functions as they were at the start."""
        exercise = self._begin(name, files)
        found = dict[str, str]()
        for path in exercise.sources:
            text, start = files.get(path, ""), self.start(path)
            for symbol in symbols_in(exercise, path):
                text = put_back(text or start, start, symbol, path)
            found[path] = text
        return found

    def renewed(self, milestone: str, path: str, text: str) -> Json:
        """Return a file of today's course with the reader's functions, and the difference.

        text: saved with another version of the course. Only functions of exercises are taken over.
        """
        start = new = self.start(path)
        error = ""
        try:
            for exercise in load(milestone, self.tree, strict=False):
                for symbol in symbols_in(exercise, path):
                    if symbol in definitions(text) and not is_cut(text, symbol, exercise):
                        new = put_back(new, text, symbol, path)
        except (SyntaxError, ResetError) as found:
            new, error = start, str(found)
        lines = difflib.unified_diff(
            text.splitlines(), new.splitlines(), "your file", "today's file", lineterm=""
        )
        return {"text": new, "diff": "\n".join(lines), "error": error}

    def packed(self, milestone: str, work: Work) -> bytes:
        """Return a zip that `grade` takes: the reader's files, ANSWERS.md and the progress.

        A file that the reader has not changed is not in it: it could replace one of another tree.
        """
        for path in (self.tree / "ANSWERS.md", self.tree / ".ladder/progress.json"):
            path.unlink(missing_ok=True)
        for exercise in load(milestone, self.tree, strict=False):
            for part, words in work.answers.get(exercise.id, {}).items():
                write(self.tree, milestone, title_of(exercise), part, words)
        save_progress(self.tree, Progress(**work.progress))
        packed = {name: text.encode() for name, text in sorted(work.files.items())}
        for name in ("ANSWERS.md", ".ladder/progress.json"):
            if (self.tree / name).is_file():
                packed[name] = (self.tree / name).read_bytes()
        for name, texts in work.earlier.items():
            for number, text in enumerate(texts, start=1):
                packed[f"{name}.bak.{number}"] = text.encode()
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in packed.items():
                archive.writestr(zipfile.ZipInfo(name, EPOCH), content)
        return data.getvalue()

    def start(self, path: str) -> str:
        """Return a file as a release wrote it. path: from the root."""
        milestone, _, inside = path.partition("/")
        start = self.tree / f"milestones/{milestone}/start/{inside}.txt"
        return start.read_text(encoding="utf-8")

    def _begin(self, name: str, files: Files) -> Exercise:
        exercise = find(name, self.tree)
        self._write(exercise.milestone, files)
        return exercise

    def _write(self, milestone: str, files: Files) -> None:
        """Write the reader's files. A file that the reader has not changed is that of the start."""
        names = {path for e in load(milestone, self.tree, strict=False) for path in e.sources}
        for path in names:
            text = files[path] if path in files else self.start(path)
            (self.tree / path).write_text(text, encoding="utf-8")

    def _run(self, exercise: Exercise, emit: Emit) -> Json:
        """Run pytest in this process. Return its status and what it printed."""
        import pytest  # here: the other calls do not need it

        from ..course.testing.probe import Probe

        for module in [name for name in sys.modules if name.startswith(OF_A_TREE)]:
            del sys.modules[module]
        sys.dont_write_bytecode = True
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        arguments = [*OPTIONS, f"--rootdir={self.tree}"]
        tests = [str(self.tree / test) for test in exercise.tests]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            status = pytest.main([*arguments, *tests], plugins=[Probe(emit, self.tree)])
        return {"status": int(status), "output": printed.getvalue()[-4000:]}


def run_of(events: list[Json]) -> Run:
    """Return the results of a run from its events. Without an end, the last test did not end."""
    results = [result_of(event["result"]) for event in events if event["event"] == "result"]
    last = events[-1] if events else {"event": ""}
    done = {result.node for result in results}
    rest = tuple(
        node for event in events if event["event"] == "collected"
        for node in event["nodes"] if node not in done
    )  # fmt: skip
    if last["event"] == "finished":
        failed = last["status"] not in (0, 1) and not results
        return Run(tuple(results), last["output"].strip() or "pytest failed" if failed else None)
    message = MESSAGES["timeout"].format(seconds=SECONDS_PLAIN)
    if last["event"] != "start":
        return Run(tuple(results), f"no test was started: {message}")
    results.append(Result(last["node"], "timeout", failure=Failure("timeout", message)))
    return Run(tuple(results), not_run=tuple(node for node in rest if node != last["node"]))


def symbols_in(exercise: Exercise, path: str) -> list[str]:
    """Return the functions of an exercise in a file: `KVCacheManager.free_slots`."""
    named = [symbol.partition(":") for symbol in exercise.symbols]
    return [symbol for file, _, symbol in named if f"{place(exercise.milestone)}/{file}" == path]


def is_cut(text: str, symbol: str, exercise: Exercise) -> bool:
    """Return whether a function of a text still raises the error of a release."""
    first, last = definitions(text)[symbol]
    lines = "\n".join(text.splitlines()[first - 1 : last])
    return "raise NotImplementedError(" in lines and f'"{exercise.id}: ' in lines


# What the worker calls. Arguments and answers are JSON.


def check(name: str, files: str, say: Callable[[str], None]) -> str:
    """Check an exercise, and say each event as it comes."""

    def emit(event: Json) -> None:
        say(json.dumps(event))

    return json.dumps(Workbench(TREE).check(name, json.loads(files), emit))


def report(name: str, files: str, events: str) -> str:
    """Return the report of a run that was ended."""
    return json.dumps(Workbench(TREE).report(name, json.loads(files), json.loads(events)))


def reset(name: str, files: str) -> str:
    """Return the files of an exercise with its functions as at the start, or what is wrong."""
    try:
        return json.dumps({"files": Workbench(TREE).reset(name, json.loads(files))})
    except (ResetError, SyntaxError) as error:
        return json.dumps({"wrong": str(error)})


def renewed(milestone: str, path: str, text: str) -> str:
    """Return today's file with the reader's functions."""
    return json.dumps(Workbench(TREE).renewed(milestone, path, text))


def packed(milestone: str, work: str) -> str:
    """Return the zip in base 64."""
    data: dict[str, Any] = json.loads(work)
    return json.dumps(base64.b64encode(Workbench(TREE).packed(milestone, Work(**data))).decode())
