"""Write grades for Gradescope, as JUnit XML, as CSV and as a table, and read them again."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

from rich.table import Table
from rich.text import Text

from .gradebook import Grade, Sheet, gradescope, why, wrong_kinds

SEED = ".seed"  # in the folder of the grades


def table(grades: dict[str, Grade]) -> Table:
    """Return a table with a row for each submission and a column for each exercise."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    result.add_column("submission")
    tests = next(iter(grades.values()))["tests"]
    for test in tests:
        result.add_column(f"{test['number']} /{test['max_score']}", justify="right")
    result.add_column(f"total /{sum(test['max_score'] for test in tests)}", justify="right")
    for name, grade in grades.items():
        cells = [_cell(test) for test in grade["tests"]]
        result.add_row(Text(name), *cells, Text(f"{grade['score']:g}", "bold"))
    return result


def as_csv(grades: dict[str, Grade]) -> str:
    """Return the grades as CSV: a row for each submission, for the import of an LMS."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = [test["number"] for test in next(iter(grades.values()))["tests"]] if grades else []
    writer.writerow(["submission", *numbers, "total", "look at it", "not run"])
    for name, grade in sorted(grades.items()):
        about = grade["extra_data"]
        yes = ["yes" if about["suspect"] else "", "" if about["complete"] else "yes"]
        name = f"'{name}" if name[:1] in "=+-@" else name  # or a spreadsheet computes it
        writer.writerow([name, *(test["score"] for test in grade["tests"]), grade["score"], *yes])
    return text.getvalue()


def save(sheet: Sheet, files: dict[str, bytes], folder: Path) -> None:
    """Write what was graded, `junit.xml`, and then `results.json`, which says that all is there."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "files", ignore_errors=True)
    for file, data in files.items():
        (folder / "files" / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / "files" / file).write_bytes(data)
    write(folder / "junit.xml", junit(sheet))
    write(folder / "results.json", json.dumps(gradescope(sheet), indent=1) + "\n")


def write(path: Path, text: str) -> None:
    """Write a file so that it is never there in part, even if this process is killed."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def saved(folder: Path, milestone: str, digest: str) -> Grade | None:
    """Return the complete grade that was saved for the same files, or None."""
    try:
        grade: Grade = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        about = grade["extra_data"]
        same = (about["milestone"], about["digest"], about["complete"]) == (milestone, digest, True)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return grade if same else None


def save_seed(folder: Path, seed: int) -> None:
    """Write the seed of a batch. Only this user may read it while students can hand in."""
    path = folder / SEED
    path.touch(0o600)
    path.write_text(f"{seed}\n", encoding="utf-8")


def seed_to_resume(folder: Path, given: int | None, new: int) -> int:
    """Return the saved seed, so that all submissions get the same questions, or `new`.

    Raises `ValueError` if another one is `given` on the command line.
    """
    try:
        seed = int((folder / SEED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return new
    if given not in (None, seed):
        raise ValueError(f"--seed {given}: the grades in {folder} have seed {seed}; omit --resume")
    return seed


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
            if not result.passed:
                kind = "failure" if result.outcome == "failed" else "error"
                text = "\n".join(why(result)) or result.outcome
                message = _printable(text.split("\n")[0])
                ElementTree.SubElement(case, kind, message=message).text = _printable(text)
        about = mark.refused or wrong_kinds(mark.answers)
        if about:
            ElementTree.SubElement(suite, "system-err").text = _printable("\n".join(about))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _cell(test: Grade) -> Text:
    note = test["extra_data"]["status"]
    style = {"passed": "green", "failed": "yellow"}.get(note, "bold red")
    words = "" if note in ("passed", "failed") else f" {note}"
    return Text(f"{test['score']:g}{words}", style)


def _printable(text: str) -> str:
    """Replace the characters that XML cannot contain."""
    return re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)
