"""An exam: the questions and the tests of one exercise, in two processes of their own.

The examiner runs no graded code and decides nothing. It knows neither the right answers nor the
points. It forks a process for all questions and one for all tests, limits their time and memory,
and passes on what they say. The tests after one that ends its process have a new process.
`client.py` receives what is said, outside the sandbox, and `answers.py` compares the answers there.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
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
        left = self.exam.tests
        while left:
            results = self._examine(left)
            left = left[len(results) :]
            for result in results:
                self.emit({"event": "result", "result": asdict(result)})
            if results[-1].outcome == "timeout":
                self.emit({"event": "stopped", "reason": f"{results[-1].node} was out of time"})
                return

    def _ask(self, exercise: str) -> bool:
        """Emit what is answered. Return False if nothing was answered in time."""
        seconds = self.exam.limits.seconds * QUESTIONS_TAKE

        def work(says: int, log: int) -> None:
            answer(exercise, self.exam.seed, self.exam.tree, says, log, seconds)

        heard = self._hear(work, seconds, seconds)
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

    def _examine(self, tests: tuple[str, ...]) -> list[Result]:
        """Run tests in one process. Return the results that it claims, up to its end."""
        seconds = self.exam.limits.seconds

        def work(says: int, log: int) -> None:
            sit(tests, self.exam.tree, says, log, seconds)

        heard = self._hear(work, seconds, seconds * len(tests))
        return results_from(tests, heard, self.exam.tree)

    def _hear(self, work: Work, silent: float, seconds: float) -> Heard:
        """Run graded code in a new process, until it ends or is ended.

        It has `seconds`, and may say nothing for `silent` of them.
        """
        says, log = Pipe(slice(LARGEST)), Pipe(slice(-LOG, None))
        child = os.fork()
        if not child:
            self._be_examined(work, says.writer, log.writer)
        os.close(says.writer)
        os.close(log.writer)
        return supervise(child, says, log, silent, seconds, self.exam.limits, self.isolation)

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


def results_from(tests: Sequence[str], heard: Heard, tree: Path) -> list[Result]:
    """Return the results of tests, from what their process said and how it ended.

    These are the results that it claims, in order, and at least one. If the process was ended, the
    last one is for the test at which it ended. An error of the whole file counts for all tests.
    """

    def lost(outcome: Outcome, kind: str, message: str) -> list[Result]:
        test, place = tests[len(found)], place_of(heard.log, tree)
        failure = Failure(kind, message, where=place, trace=heard.log[-SHOWN:])
        return [*found, Result(test, outcome, failure=failure)]

    found: list[Result] = []
    ended = None
    for line in heard.lines:
        try:
            data = json.loads(line)
            if "ended" in data:
                ended = readable(str(data["ended"]))
                continue
            claimed = _claimed(str(data["result"]["node"]), data["result"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return lost("error", "unreadable", "the process of the test did not report a result")
        if claimed.node == tests[len(found)]:
            found.append(claimed)
        elif claimed.node not in tests and not claimed.passed:
            return found + [replace(claimed, node=test) for test in tests[len(found) :]]
        if len(found) == len(tests):
            break
    if heard.how in ("timeout", "memory"):
        del found[len(tests) - 1 :]  # its last test did not let it end
        if heard.how == "timeout":
            said = "still running at its time limit: an endless loop?"
            return lost("timeout", "timeout", said)
        return lost("crashed", "memory", "its processes used more memory than the limit")
    if len(found) == len(tests) or (found and ended is not None):
        return found
    if ended is None:
        said = f"the process ended before the test did ({heard.how})"
        return lost("crashed", "crashed", said)
    internal = re.findall(r"^INTERNALERROR> (\S.*)", heard.log, re.MULTILINE)
    return lost("error", "ended", internal[-1] if internal else ended)


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
    claimed = data.get("seconds")
    seconds = claimed if isinstance(claimed, float) and 0 <= claimed < 1e6 else 0.0
    return Result(test, outcome, seconds, title=title, failure=failure)


def place_of(log: str, tree: Path) -> str | None:
    """Return the innermost line of the graded code in a dump of stacks, the newest call first."""
    for frame in FRAME.finditer(log):
        path = Path(frame["file"])
        if tree in path.parents:
            inside = path.relative_to(tree)
            if inside.parts[0] not in NOT_GRADED:
                return f"{inside}:{frame['line']} in {frame['name']}"
    return None
