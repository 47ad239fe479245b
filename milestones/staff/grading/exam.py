"""An exam: the questions and the tests of one exercise, each in a process of its own.

The examiner runs no graded code and decides nothing. It knows neither the right answers nor the
points. It forks a process for each test and one for all questions, limits their time and memory,
and passes on what they say. `client.py` receives this, outside the sandbox, and `answers.py`
compares the answers there.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from ...course.testing.results import Failure, Outcome, Result
from . import limits
from .answers import readable
from .graded_process import NOT_GRADED, answer, sit
from .limits import LARGEST, LOG, Heard, Limits, Pipe, supervise
from .sandbox import Isolation, give_up_rights
from .system_calls import forbid_hidden_memory

MOST_LINES = 2000  # that are passed on: an exercise has fewer seeds
QUESTIONS_TAKE = 2  # times the limit of a test
SHOWN = 4000  # characters of output that a result has
Emit = Callable[[dict[str, Any]], None]
Work = Callable[[int, int], None]  # a descriptor for what it says, and one for its output
OUTCOMES = get_args(Outcome)
TEXTS = {field.name for field in fields(Failure)} - {"unwritten", "calls"}
EXERCISE = re.compile(r"m\d{1,3}\.\d{1,3}")
FRAME = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+),? in (?P<name>\S+)')


@dataclass(frozen=True)
class Exam:
    """What to run, where, and within which limits. No questions: `exercise` is None."""

    tree: Path
    tests: tuple[str, ...]
    limits: Limits
    exercise: str | None = None
    seed: int = 0  # of the questions


class Examiner:
    """Runs an exam, in a process that `sandbox.shut_off` has isolated."""

    def __init__(self, exam: Exam, isolation: Isolation, emit: Emit) -> None:
        self.exam = exam
        self.isolation = isolation
        self.emit = emit

    def run(self) -> None:
        """Emit the answers, and then a result for each test, until a test is out of time."""
        if self.exam.exercise is not None and not self._ask(self.exam.exercise):
            return
        for test in self.exam.tests:
            result = self._examine(test)
            self.emit({"event": "result", "result": asdict(result)})
            if result.outcome == "timeout":
                self.emit({"event": "stopped", "reason": f"{test} was out of time"})
                return

    def _ask(self, exercise: str) -> bool:
        """Emit what is answered. Return False if nothing was answered in time."""
        seconds = self.exam.limits.seconds * QUESTIONS_TAKE

        def work(says: int, log: int) -> None:
            answer(exercise, self.exam.seed, self.exam.tree, says, log, seconds)

        heard = self._hear(work, seconds)
        place = place_of(heard.log, self.exam.tree)
        for line in heard.lines[1:MOST_LINES]:
            self.emit({"event": "answer", "text": line.decode(errors="replace")})
        self.emit({"event": "asked", "how": heard.how, "place": place})
        if heard.how != "timeout" or len(heard.lines) > 1:
            return True
        what = "answering the first question" if heard.lines else "importing the code"
        reason = f"{what} does not end{f', at {place}' if place else ''}"
        self.emit({"event": "stopped", "reason": reason, "import": not heard.lines})
        return False

    def _examine(self, test: str) -> Result:
        """Run one test in one process, and return the result that it claims."""
        started = time.monotonic()

        def work(says: int, log: int) -> None:
            sit(test, self.exam.tree, says, log, self.exam.limits.seconds)

        result = result_from(test, self._hear(work, self.exam.limits.seconds), self.exam.tree)
        return replace(result, seconds=time.monotonic() - started)

    def _hear(self, work: Work, seconds: float) -> Heard:
        """Run graded code in a new process, until it ends or is ended."""
        says, log = Pipe(slice(LARGEST)), Pipe(slice(-LOG, None))
        child = os.fork()
        if not child:
            self._be_examined(work, says.writer, log.writer)
        os.close(says.writer)
        os.close(log.writer)
        return supervise(child, says, log, seconds, self.exam.limits, self.isolation)

    def _be_examined(self, work: Work, says: int, log: int) -> None:
        """Run graded code in the child. It reaches the examiner only by what it says."""
        try:
            os.setsid()
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(signum, signal.SIG_DFL)
            limits.apply(self.exam.limits, own_processes=self.isolation.counted)
            give_up_rights(self.isolation.user)
            if self.isolation.memory:
                forbid_hidden_memory()
            kept = sorted({says, log})
            for low, high in zip([3, *(fd + 1 for fd in kept)], [*kept, 65536], strict=True):
                os.closerange(low, high)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            work(says, log)
        finally:
            os._exit(70)


def result_from(test: str, heard: Heard, tree: Path) -> Result:
    """Return the result of a test, from what its process said and how the process ended."""

    def lost(outcome: Outcome, kind: str, message: str) -> Result:
        place = place_of(heard.log, tree)
        failure = Failure(kind, message, where=place, trace=heard.log[-SHOWN:])
        return Result(test, outcome, failure=failure)

    if heard.how == "timeout":
        return lost("timeout", "timeout", "still running at its time limit: an endless loop?")
    if heard.how == "memory":
        return lost("crashed", "memory", "its processes used more memory than the limit")
    if not heard.lines:
        return lost("crashed", "crashed", f"the process ended before the test did ({heard.how})")
    try:
        data = json.loads(heard.lines[-1])
        results = [_claimed(test, result) for result in data["results"]]
        ended = readable(str(data["ended"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return lost("error", "unreadable", "the process of the test did not report a result")
    if failed := [result for result in results if not result.passed]:
        return failed[0]
    if len(results) != 1:
        internal = re.findall(r"^INTERNALERROR> (\S.*)", heard.log, re.MULTILINE)
        return lost("error", "ended", internal[-1] if internal else ended)
    return results[0]


def _claimed(test: str, data: dict[str, Any]) -> Result:
    """Return a result that graded code may have written: each field gets its type."""
    outcome: Outcome = data["outcome"] if data["outcome"] in OUTCOMES else "error"
    failure = data.get("failure")
    if failure is not None:
        texts: dict[str, Any] = {
            name: readable(str(value))
            for name, value in failure.items()
            if value is not None and name in TEXTS
        }
        unwritten = [name for name in map(str, failure["unwritten"]) if EXERCISE.fullmatch(name)]
        failure = Failure(**{"kind": "", **texts}, unwritten=tuple(unwritten[:1]))
    title = readable(str(data["title"])).partition("\n")[0]
    return Result(test, outcome, title=title, failure=failure)


def place_of(log: str, tree: Path) -> str | None:
    """Return the innermost line of the graded code in a dump of stacks, the newest call first."""
    for frame in FRAME.finditer(log):
        path = Path(frame["file"])
        if tree in path.parents:
            inside = path.relative_to(tree)
            if inside.parts[0] not in NOT_GRADED:
                return f"{inside}:{frame['line']} in {frame['name']}"
    return None
