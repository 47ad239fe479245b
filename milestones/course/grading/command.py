"""`python -m milestones grade DIR...`: grade submissions, each one separately.

Only the files that the exercises name are taken from a submission. The tests, `common/` and all
other files are the instructor's. Every test runs in its own process, with limits on time, memory,
files and processes. Where the kernel allows it, this process has no access to the network and to
other files. `grading/exam.py` explains how results are judged, and what no check can detect.

--hidden adds the instructor's own tests: test_m3_2*.py counts for exercise m3.2. Students see how
many of them passed, and nothing else. --out DIR writes DIR/NAME/results.json (Gradescope's format)
and junit.xml; for a single submission, into DIR itself. A file that uses something that no solution
needs (ctypes, gc, an assignment to torch.equal) is refused with line and reason, unless --allow
names it. The report says what graded code had access to. If that includes files, as in a container
without rights, give the course's folder to root alone (chmod 700) and grade as root.

Exit status: 0 everything was graded; 1 something was refused, was not run, or a person must look at
it; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from .. import record
from ..console import wide_console
from ..delta import ROOT
from ..exercise import Exercise
from . import gradebook, submission
from .client import ForkServer
from .gradebook import Mark, Sheet
from .limits import Limits
from .submission import Course, Submission

EXAMPLE = """python -m milestones grade submissions/* --milestone m3 --out grades
              python -m milestones grade submissions/anna --milestone m3 --hidden hidden/
              python -m milestones grade . --milestone m3     # the reference: full points"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m milestones grade`."""
    parser.add_argument("submissions", nargs="+", type=Path, metavar="DIR", help="a student's tree")
    parser.add_argument("--milestone", metavar="M", help="default: the highest in the submission")
    parser.add_argument("--hidden", type=Path, metavar="DIR", help="a folder with hidden tests")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results.json and junit.xml")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="exams in parallel")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit for each test (60)")
    parser.add_argument("--memory", type=float, default=3.0, metavar="GIB", help="per test (3)")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="NAME", help="a name that is not refused"
    )
    parser.add_argument(
        "--no-namespaces", dest="namespaces", action="store_false",
        help="use only limits, and another user if run as root; if namespaces cause problems",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print all results as JSON")
    parser.set_defaults(root=ROOT, bare=False)


def main(args: argparse.Namespace) -> int:
    """Grade, report and write the results. Return the exit status."""
    try:
        sheets = grade(args)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if args.out:
        for sheet in sheets:
            gradebook.save(sheet, args.out if len(sheets) == 1 else args.out / sheet.name)
    if args.json:
        data = {sheet.name: gradebook.gradescope(sheet) for sheet in sheets}
        sys.stdout.write(json.dumps(data, indent=1) + "\n")
    else:
        _report(sheets, detailed=len(sheets) == 1)
    return 1 if any(sheet.not_run or sheet.suspect for sheet in sheets) else 0


def grade(args: argparse.Namespace) -> list[Sheet]:
    """Return the graded sheets in order. Raises `ValueError` if a submission cannot be graded."""
    folders = [folder.resolve() for folder in args.submissions]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: there is no such folder")
    milestone = _milestone(args, folders[0])
    limits = replace(Limits(), seconds=args.seconds, memory=int(args.memory * (1 << 30)))
    scratch = Path(tempfile.mkdtemp(prefix="ladder-grade-")).resolve()
    scratch.chmod(0o711)  # another user can pass through it to the tree, but not list it
    try:
        course = submission.prepare(milestone, args.root, scratch / "template", args.hidden)
        taken = [
            submission.take(folder, name, course, args.allow)
            for folder, name in zip(folders, _names(folders), strict=True)
        ]
        places = [args.root, *folders, scratch, *(p for p in (args.hidden, args.out) if p)]
        out_of_sight = [Path(place).resolve() for place in places]
        fork_server = ForkServer(scratch, bare=args.bare, namespaces=args.namespaces)
        with fork_server, ThreadPoolExecutor(max(1, args.jobs)) as pool:
            grader = _Grader(fork_server, course, limits, scratch, out_of_sight)
            grader.collect(args.root)
            return list(pool.map(grader.sheet, taken)) if len(taken) > 1 else [
                grader.sheet(taken[0], pool)
            ]  # fmt: skip
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _Grader:
    """Grades submissions of one milestone. Its methods run in several threads."""

    def __init__(
        self,
        fork_server: ForkServer,
        course: Course,
        limits: Limits,
        scratch: Path,
        hidden: list[Path],
    ) -> None:
        self.fork_server = fork_server
        self.course = course
        self.limits = limits
        self.scratch = scratch
        self.hidden = hidden
        self.nodes: dict[str, list[str]] = {}  # exercise -> node ids

    def collect(self, root: Path) -> None:
        """Collect the tests from the reference, before any submission is in a tree."""
        tree = submission.complete(self.course, root, self.scratch / "reference")
        try:
            for name, tests in self.course.tests.items():
                self.nodes[name] = self.fork_server.collect(tree, tests)
        finally:
            shutil.rmtree(tree)

    def sheet(self, student: Submission, pool: ThreadPoolExecutor | None = None) -> Sheet:
        """Grade one submission. With a pool, its exercises are graded in parallel."""
        started = time.monotonic()
        place = Path(tempfile.mkdtemp(prefix="exam-", dir=self.scratch))
        place.chmod(0o711)
        tree = submission.lay_out(student, self.course, place / "tree")
        missing: dict[str, None] = {}

        def mark(exercise: Exercise) -> Mark:
            if reasons := student.reasons(exercise):
                return Mark(exercise, refused=reasons)
            tests = self.nodes[exercise.id]
            outcome = self.fork_server.examine(tree, tests, self.limits, self.hidden)
            missing.update(dict.fromkeys(outcome.missing))
            return Mark(exercise, outcome.results, [], outcome.forged, outcome.broken)

        marks = list((pool.map if pool else map)(mark, self.course.exercises))
        shutil.rmtree(place, ignore_errors=True)
        sheet = Sheet(student.name, self.course.milestone, marks)
        sheet.not_run = [f"{m.exercise.id}: {r}" for m in marks for r in m.refused]
        sheet.not_run += [f"{m.exercise.id}: {m.broken}" for m in marks if m.broken]
        if missing:
            sheet.not_run.append(f"graded code had access to: {'; '.join(missing)}")
        sheet.seconds = time.monotonic() - started
        return sheet


def _milestone(args: argparse.Namespace, folder: Path) -> str:
    """Return the named milestone, or the highest one with exercises that the submission has."""
    if args.milestone:
        return record.find_milestone(args.milestone, args.root)
    there = [name for name in record.recorded(args.root) if (folder / name).is_dir()]
    if not there:
        raise ValueError(f"{folder} has no milestone with exercises; name one with --milestone")
    return there[-1]


def _names(folders: list[Path]) -> list[str]:
    """Return the names of the folders. Equal names get the name of the parent folder too."""
    count = Counter(folder.name for folder in folders)
    names = [f.name if count[f.name] == 1 else f"{f.parent.name}-{f.name}" for f in folders]
    if len(set(names)) < len(names):
        raise ValueError(f"two submissions have the same name: {', '.join(sorted(names))}")
    return names


def _report(sheets: list[Sheet], *, detailed: bool) -> None:
    console = wide_console()
    console.print(gradebook.table(sheets))
    for sheet in sheets:
        for mark in sheet.marks if detailed else ():
            if mark.status != "passed":
                console.print(f"\n{mark.exercise.id} {mark.exercise.title}: {mark.status}")
                console.print("\n".join(f"  {line}" for line in gradebook.words(mark)))
        for line in sheet.not_run:
            console.print(f"{sheet.name}: not run: {line}")
        if sheet.suspect:
            console.print(f"{sheet.name}: please look at this code: it interfered with its grading")
