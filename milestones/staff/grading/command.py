"""`python -m milestones grade PATH...`: grade submissions, each one separately.

A submission is a folder or a zip file; so is a download of all submissions from Canvas, Moodle or
Gradescope. The files that the exercises name are taken from it, and Python files that the student
added to the milestone. The tests, `common/` and all other files are the instructor's.

The points of an exercise are decided by answers: the grader makes questions from random numbers,
and compares the answers with those of the reference. The code that is graded runs in other
processes, which never have the right answers. A kind of question is right if all its answers are.
Of the share of right kinds and the share of tests that passed, the lower one counts. INSTRUCTORS.md
says what this guarantees, and what not.

--hidden adds the instructor's own tests: test_m3_2*.py counts for exercise m3.2. Students see how
many of them passed, and nothing else. --out DIR writes DIR/NAME/results.json (Gradescope's format)
and junit.xml after each submission, and DIR/grades.csv; for a single submission, into DIR itself.
With --resume, a submission is not graded again if its grade is in DIR already and no file has
changed. The report says what graded code had access to, and the seed of the random numbers. --seed
sets it: the same questions are asked again.

Exit status: 0 all submissions were graded; 1 something was not run, or a person must look at it;
2 wrong usage; 3 the grader failed, and a submission has no grade; 130 or 143 interrupted.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from ...chain import find_engine
from ...console import wide_console
from ...course.delta import ROOT
from . import grade_files, gradebook, submission
from .answers import escaped
from .client import ForkServer, GraderError
from .gradebook import Grade, Sheet
from .grader import Grader
from .limits import Limits
from .sandbox import require_isolation
from .submission import Course, Submission
from .upload import Upload, Uploads

EXAMPLE = """python -m milestones grade submissions/* --milestone m3 --out grades
              python -m milestones grade submissions.zip --milestone m3 --out grades --resume
              python -m milestones grade submissions/anna --milestone m3 --hidden hidden/
              python -m milestones grade . --milestone m3     # the reference: full points"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m milestones grade`."""
    parser.add_argument(
        "submissions", nargs="+", type=Path, metavar="PATH", help="a student's tree, or a zip file"
    )
    parser.add_argument("--milestone", metavar="M", required=True, help="the graded milestone: m3")
    parser.add_argument("--hidden", type=Path, metavar="DIR", help="a folder with hidden tests")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the grades here")
    parser.add_argument("--resume", action="store_true", help="keep the grades that are in --out")
    parser.add_argument("--seed", type=int, metavar="N", help="of the questions (random)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="exams in parallel")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit for each test (60)")
    parser.add_argument("--memory", type=float, default=3.0, metavar="GIB", help="per test (3)")
    parser.set_defaults(root=ROOT, bare=False)


def main(args: argparse.Namespace) -> int:
    """Grade, report and write the results. Return the exit status."""
    batch = Batch(args)
    status = 0
    try:
        with signals_raise():
            batch.run()
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except GraderError as error:
        sys.stderr.write(f"{error}\n")
        return 3
    except InterruptedBySignal as error:
        status = 128 + int(error.args[0])
        batch.save_table()
        sys.stderr.write(f"interrupted: {len(batch.grades)} submissions have a grade\n")
    batch.report()
    return status or batch.status


class InterruptedBySignal(KeyboardInterrupt):
    """A signal has asked the grader to end."""


@contextmanager
def signals_raise() -> Iterator[None]:
    """Raise `InterruptedBySignal` in this thread for Ctrl-C and SIGTERM."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise InterruptedBySignal(number)

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Batch:
    """The grades of all submissions of a command line, as they come."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.sheets: dict[str, Sheet] = {}
        self.grades: dict[str, Grade] = {}
        self.failed: dict[str, str] = {}  # submissions without a grade
        self.strays: list[str] = []
        self.single = False
        self.seed = secrets.randbits(48) if args.seed is None else args.seed

    def run(self) -> None:
        """Grade all submissions. Raises `ValueError` if none can be graded."""
        args = self.args
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            grade_files.write(args.out / ".writable", "")  # find out before the first
            (args.out / ".writable").unlink()
            if args.resume:
                self.seed = grade_files.seed_to_resume(args.out, args.seed, self.seed)
        milestone = find_engine(args.milestone, args.root)
        scratch = Path(tempfile.mkdtemp(prefix="ladder-grade-")).resolve()
        scratch.chmod(0o711)  # another user can pass through it to the tree, but not list it
        try:
            (scratch / "uploads").mkdir(0o700)
            course = submission.prepare(milestone, args.root, scratch, args.hidden)
            uploads = Uploads(milestone, course.names, scratch / "uploads")
            found, self.strays = uploads.find(args.submissions), uploads.strays
            self.single = len(found) == 1
            require_isolation(course.template)
            limits = replace(Limits(), seconds=args.seconds, memory=int(args.memory * (1 << 30)))
            places = [args.root, *(upload.folder for upload in found), scratch, *args.submissions]
            places += [path for path in (args.hidden, args.out) if path]
            out_of_sight = [place.resolve() for place in places]
            with ForkServer(scratch, bare=args.bare) as fork_server:
                grader = Grader(fork_server, course, limits, scratch, out_of_sight, self.seed)
                grader.set_papers(args.root)
                if args.out:
                    grade_files.save_seed(args.out, self.seed)
                self._grade(grader, [*self._to_grade(found, course)])
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _to_grade(self, found: list[Upload], course: Course) -> Iterator[Submission]:
        """Yield the submissions that have no grade yet."""
        for upload in found:
            try:
                student = submission.take(upload, course)
            except Exception as error:  # it costs no other submission its grade
                why = escaped(f"cannot be read: {type(error).__name__}: {error}")
                self.failed[upload.name] = why
                continue
            if not self._resumed(student, course.milestone):
                yield student

    def _resumed(self, student: Submission, milestone: str) -> bool:
        if not (self.args.resume and self.args.out):
            return False
        grade = grade_files.saved(self._folder(student.name), milestone, student.digest)
        if grade is not None:
            self.grades[student.name] = grade
        return grade is not None

    def _grade(self, grader: Grader, students: list[Submission]) -> None:
        """Grade in parallel. Save each grade at once, and show how far it is."""
        total = len(self.grades) + len(self.failed) + len(students)
        pool = ThreadPoolExecutor(max(1, self.args.jobs))
        todo: dict[Future[Sheet], Submission] = {}
        try:
            todo = {pool.submit(grader.sheet, student): student for student in students}
            while todo:
                done, _ = wait(todo, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in done:
                    self._finished(todo.pop(future), future, total)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            if todo:
                grader.fork_server.stop()
            pool.shutdown()

    def _finished(self, student: Submission, future: Future[Sheet], total: int) -> None:
        name = student.name
        try:
            sheet = future.result()
            grade = gradebook.gradescope(sheet)
            self.sheets[name], self.grades[name] = sheet, grade
            if self.args.out:
                grade_files.save(sheet, student.files, self._folder(name))
                self.save_table()
            said = f"{sheet.points:g} points, {sheet.seconds:.0f} s"
        except Exception as error:
            said = escaped(f"the grader failed: {type(error).__name__}: {error}")
            self.failed[name] = said
        number = len(self.grades.keys() | self.failed.keys())
        sys.stderr.write(f"[{number}/{total}] {name}: {said}\n")

    @property
    def status(self) -> int:
        """The exit status of a batch that has come to its end."""
        about = [grade["extra_data"] for grade in self.grades.values()]
        look = any(one["suspect"] or not one["complete"] for one in about)
        return 3 if self.failed else int(look)

    def save_table(self) -> None:
        """Write the grades so far as one table, if they are those of several submissions."""
        if self.args.out and not self.single:
            grade_files.write(self.args.out / "grades.csv", grade_files.as_csv(self.grades))

    def _folder(self, name: str) -> Path:
        out: Path = self.args.out
        return out if self.single else out / name

    def report(self) -> None:
        """Print the grades, and what a person must know."""
        console = wide_console()
        if self.grades:
            console.print(f"the seed of the questions: {self.seed}")
            console.print(grade_files.table(dict(sorted(self.grades.items()))))
        for line in _details(self.sheets.values()) if self.single else ():
            console.print(line, markup=False, highlight=False)
        for name, grade in sorted(self.grades.items()):
            about = [line for line in grade["output"].splitlines() if line != "Not run:"]
            if grade["extra_data"]["suspect"]:
                about.append(
                    "please look at this code: its tests passed, but its answers are wrong"
                )
            for line in about:
                console.print(f"{name}: {line}", markup=False, highlight=False)
        for line in [*self.strays, *(f"{name}: {why}" for name, why in self.failed.items())]:
            console.print(line, markup=False, highlight=False)


def _details(sheets: Iterable[Sheet]) -> Iterator[str]:
    for sheet in sheets:
        for mark in sheet.marks:
            if mark.status != "passed":
                yield f"\n{mark.exercise.id} {mark.exercise.title}: {mark.status}"
                yield from (f"  {line}" for line in gradebook.words(mark))
