"""Compute points from results, and write them for Gradescope, as JUnit XML and as a table."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.table import Table
from rich.text import Text

from ..exercise import Exercise
from ..testing.results import Result
from .submission import HIDDEN

UNSEEN = "a hidden test"


@dataclass
class Mark:
    """The points of one exercise, and the reasons for lost points."""

    exercise: Exercise
    results: list[Result] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # reasons why its tests were not run
    forged: str | None = None  # the canary that was reported as passed
    broken: str | None = None  # the reason why the exam ended too early

    @property
    def passed(self) -> int:
        return 0 if self.forged else sum(result.passed for result in self.results)

    @property
    def points(self) -> float:
        """The exercise's points times the share of tests that passed."""
        return round(self.exercise.points * self.passed / max(1, len(self.results)), 2)

    @property
    def status(self) -> str:
        """The status in one or a few words."""
        if self.refused:
            return "refused"
        if self.forged or any(_kind(result) == "Tampered" for result in self.results):
            return "tampered"
        if self.broken:
            return "not run to its end"
        return "passed" if self.passed == len(self.results) > 0 else "failed"


@dataclass
class Sheet:
    """The grades of one submission."""

    name: str
    milestone: str
    marks: list[Mark]
    not_run: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def points(self) -> float:
        return round(sum(mark.points for mark in self.marks), 2)

    @property
    def possible(self) -> int:
        return sum(mark.exercise.points for mark in self.marks)

    @property
    def suspect(self) -> bool:
        """Whether a person should look at the submission."""
        return any(mark.status == "tampered" for mark in self.marks)


def gradescope(sheet: Sheet) -> dict[str, Any]:
    """Return `results.json`. Students see how many hidden tests passed, not what they check."""
    return {
        "score": sheet.points,
        "execution_time": round(sheet.seconds),
        "output": "\n".join(["Not run:", *sheet.not_run]) if sheet.not_run else "",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "extra_data": {"milestone": sheet.milestone, "suspect": sheet.suspect},
        "tests": [
            {
                "number": mark.exercise.id,
                "name": mark.exercise.title,
                "score": mark.points,
                "max_score": mark.exercise.points,
                "status": "passed" if mark.status == "passed" else "failed",
                "output": "\n".join(words(mark)),
                "output_format": "text",
                "visibility": "visible",
            }
            for mark in sheet.marks
        ],
    }


def words(mark: Mark) -> list[str]:
    """Return the report for the student: each test, with the reason if it did not pass."""
    if mark.refused:
        return ["The tests of this exercise were not run.", *mark.refused]
    if mark.forged:
        return ["A test that must fail was reported as passed: no result here counts."]
    lines = [f"{mark.passed} of {len(mark.results)} tests passed."]
    for result in mark.results:
        name = result.node.partition("::")[2] or result.node
        if is_hidden(result):
            lines.append(f"{UNSEEN}: {result.outcome}")
        else:
            lines.append(f"{name}: {result.outcome}{_title(result)}")
            lines += [] if result.passed else [f"    {line}" for line in why(result)]
    return lines


def why(result: Result) -> list[str]:
    """Return a failure in a few lines; for a hang or a crash, with its place in the code."""
    failure = result.failure
    if failure is None:
        return []
    if failure.unwritten:
        return [f"{failure.unwritten[0]} is not written yet"]
    lines = [f"{failure.kind}: {failure.message}" if failure.message else failure.kind]
    lines += [failure.explanation] if failure.explanation else []
    if failure.called and failure.returned:
        lines.append(f"{failure.called} gave {failure.returned}; expected {failure.expected}")
    lines += [failure.example] if failure.example else []
    lines += [f"at {failure.where}"] if failure.where else []
    if result.outcome in ("timeout", "crashed"):
        lines += failure.trace.strip().splitlines()[-12:]
    return [line for text in lines for line in text.splitlines()][:40]


def junit(sheet: Sheet) -> str:
    """Return the sheet as JUnit XML."""
    suites = ElementTree.Element("testsuites", name=sheet.name)
    for mark in sheet.marks:
        failed = sum(not result.passed for result in mark.results)
        suite = ElementTree.SubElement(
            suites, "testsuite", name=f"{mark.exercise.id} {mark.exercise.title}",
            tests=str(len(mark.results)), failures=str(failed),
            time=f"{sum(result.seconds for result in mark.results):.3f}",
        )  # fmt: skip
        for result in mark.results:
            file, _, name = result.node.partition("::")
            case = ElementTree.SubElement(
                suite, "testcase", classname=file.removesuffix(".py").replace("/", "."),
                name=name or file, time=f"{result.seconds:.3f}",
            )  # fmt: skip
            if not result.passed or mark.forged:
                kind = "failure" if result.outcome == "failed" else "error"
                text = "\n".join(why(result)) or result.outcome
                message = _printable(text.split("\n")[0])
                ElementTree.SubElement(case, kind, message=message).text = _printable(text)
        if mark.refused:
            ElementTree.SubElement(suite, "system-err").text = _printable("\n".join(mark.refused))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def table(sheets: list[Sheet]) -> Table:
    """Return a table with a row for each submission and a column for each exercise."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    exercises = [mark.exercise for mark in sheets[0].marks]
    result.add_column("submission")
    for exercise in exercises:
        result.add_column(f"{exercise.id} /{exercise.points}", justify="right")
    result.add_column(f"total /{sheets[0].possible}", justify="right")
    for sheet in sheets:
        cells = [_cell(mark) for mark in sheet.marks]
        result.add_row(sheet.name, *cells, Text(f"{sheet.points:g}", "bold"))
    return result


def save(sheet: Sheet, folder: Path) -> None:
    """Write `results.json` and `junit.xml` of one submission."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(gradescope(sheet), indent=1) + "\n")
    (folder / "junit.xml").write_text(junit(sheet), encoding="utf-8")


def is_hidden(result: Result) -> bool:
    """Return whether a test is one of the instructor's hidden tests."""
    return result.node.startswith(f"{HIDDEN}/")


def _cell(mark: Mark) -> Text:
    style = {"passed": "green", "failed": "yellow"}.get(mark.status, "bold red")
    note = "" if mark.status in ("passed", "failed") else f" {mark.status}"
    return Text(f"{mark.points:g}{note}", style)


def _title(result: Result) -> str:
    return f" ({result.title})" if result.title else ""


def _kind(result: Result) -> str:
    return result.failure.kind if result.failure else ""


def _printable(text: str) -> str:
    """Replace the characters that XML cannot contain."""
    return re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)
