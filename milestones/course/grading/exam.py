"""An exam: the tests of one exercise, each in its own process, judged from another process.

The examiner runs no graded code. It knows the tests and forks a process for each of them. The
process sends a claim: what it collected, the outcome, and what was replaced. A claim counts if it
is the only one, has the token of its process and names its test, and if nothing was replaced. A
process that ends without a claim has crashed, whatever its exit status. A process that takes too
long is killed, with all processes that it started.

Canaries: some tests that passed are run again with a failure after their last line. If such a test
is reported as passed, then no result of this code counts.

Limits: graded code runs in the process of the test. Code that knows this file can find the token
and the plugin in memory, report canaries correctly and lie about the other tests. A value that
claims to equal everything passes a test that only compares. No check inside that process can
detect this. `static_checks.py` refuses the simple means for it, with line and reason. To find
hidden ones, a person must read the submission.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..testing.results import Failure, Result, result_of
from . import limits as limits_of
from .limits import Limits
from .sandbox import Isolation, give_up_rights, kill_all
from .test_process import sit

NUM_CANARIES = 2
LARGEST_CLAIM = 1 << 20  # bytes
PAUSE = 0.02  # seconds between two checks of a test
STALL = 0.5  # a longer pause than this is the machine's fault, and not the test's
LOG = 4000  # characters of output that are kept
Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Exam:
    """What to run, where, and within which limits."""

    tree: Path
    tests: tuple[str, ...]
    limits: Limits


class Examiner:
    """Runs an exam, in a process that `sandbox.shut_off` has isolated."""

    def __init__(self, exam: Exam, isolation: Isolation, emit: Emit) -> None:
        self.exam = exam
        self.isolation = isolation
        self.emit = emit
        self.files = {path: path.read_bytes() for path in _files(exam.tree)}

    def run(self) -> None:
        """Emit a result for each test, and then the result of the canaries."""
        passed = []
        for test in self.exam.tests:
            result = self.examine(test)
            passed += [test] if result.passed else []
            self.emit({"event": "result", "result": asdict(result)})
        for test in _some(passed, NUM_CANARIES):
            if self.examine(test, canary=secrets.token_hex(8)).passed:
                self.emit({"event": "forged", "test": test})
                return

    def examine(self, test: str, canary: str | None = None) -> Result:
        """Run one test in one process. The result is the examiner's own judgement."""
        token = secrets.token_hex(16)
        reader, writer = os.pipe()
        started = time.monotonic()
        with tempfile.TemporaryFile() as log:
            child = os.fork()
            if not child:
                os.close(reader)
                self._be_examined(test, writer, log.fileno(), token, canary)
            os.close(writer)
            claim, how = self._hear(child, reader)
            os.close(reader)
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - LOG))
            said = log.read().decode(errors="replace")
        result = judge(test, claim, how, token, said)
        result = replace(result, seconds=time.monotonic() - started)
        changed = self._restore()
        if changed and canary is None:
            message = f"it changed files of the test tree: {', '.join(changed[:5])}"
            return replace(result, outcome="error", failure=Failure("Tampered", message))
        return result

    def _be_examined(
        self, test: str, claims: int, log: int, token: str, canary: str | None
    ) -> None:
        """Run the test in the child. It can reach the examiner only with its claim."""
        try:
            os.setsid()
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(signum, signal.SIG_DFL)
            limits_of.apply(self.exam.limits, own_processes=self.isolation.counted)
            give_up_rights(self.isolation.user)
            kept = sorted({claims, log})
            for low, high in zip([3, *(fd + 1 for fd in kept)], [*kept, 65536], strict=True):
                os.closerange(low, high)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sit(test, self.exam.tree, claims, log, token, canary, self.exam.limits.seconds)
        finally:
            os._exit(70)

    def _hear(self, child: int, reader: int) -> tuple[bytes, str]:
        """Return the child's claim, and how the child ended. All its processes are killed."""
        os.set_blocking(reader, False)
        deadline = time.monotonic() + self.exam.limits.seconds
        heard, how, looked = b"", "", time.monotonic()
        while not how:
            select.select([reader], [], [], PAUSE)
            now = time.monotonic()
            if now - looked > STALL:  # the machine was stopped: the test gets this time back
                deadline += now - looked
            looked = now
            heard += _available(reader)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                how = _ending(status)
            elif now > deadline:
                how = "timeout"
            elif len(heard) > LARGEST_CLAIM:
                how = "claims without end"
            elif self.isolation.processes and limits_of.memory_of_all() > self.exam.limits.memory:
                how = "memory"
        kill_all(self.isolation, child)
        _reap()
        return heard + _available(reader), how

    def _restore(self) -> list[str]:
        """Undo changes of graded code in the tree. Return the files that it changed."""
        if self.isolation.files:  # the tree is mounted read-only: there are no changes
            return []
        now = {path: path.read_bytes() for path in _files(self.exam.tree)}
        changed = [path for path in {*now, *self.files} if now.get(path) != self.files.get(path)]
        for path in changed:
            if path in self.files:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.files[path])
            else:
                path.unlink()
        return sorted(str(path.relative_to(self.exam.tree)) for path in changed)


def judge(test: str, claim: bytes, how: str, token: str, said: str) -> Result:
    """Return the result of a test, from the claim of its process and how the process ended."""

    def lost(outcome: str, kind: str, message: str) -> Result:
        return result_of(
            {"node": test, "outcome": outcome,
             "failure": {**asdict(Failure(kind, message)), "trace": said}}
        )  # fmt: skip

    if how == "timeout":
        return lost("timeout", "timeout", "still running at its time limit: an endless loop?")
    if how == "memory":
        return lost("crashed", "memory", "its processes used more memory than the limit")
    lines = claim.splitlines()
    if not lines:
        return lost("crashed", "crashed", f"the process ended before the test did ({how})")
    try:
        data = json.loads(lines[0])
        own = len(lines) == 1 and data["token"] == token
        results = [result_of(result) for result in data["results"]]
        problems = [*map(str, data["problems"])]
        finished, about = data["finished"] is True, data["collected"] == [[test]]
        ended = str(data["ended"])
    except (ValueError, KeyError, TypeError, AttributeError):
        own = False
    if not own:
        return lost("error", "Tampered", "the claim does not come from the process of the test")
    if problems:
        return lost("error", "Tampered", "; ".join(problems[:5]))
    if failed := [result for result in results if not result.passed]:
        return replace(failed[0], node=test)
    if not results:
        internal = re.findall(r"^INTERNALERROR> (\S.*)", said, re.MULTILINE)
        return lost("error", "ended", internal[-1] if internal else ended)
    if not (about and finished and [result.node for result in results] == [test]):
        return lost("error", "Tampered", "a test was reported as passed, but did not run")
    return results[0]


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _available(reader: int) -> bytes:
    data = b""
    while len(data) <= LARGEST_CLAIM:
        try:
            part = os.read(reader, 1 << 16)
        except BlockingIOError:
            break
        if not part:
            break
        data += part
    return data


def _reap() -> None:
    """Wait for all children. They have been killed."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _files(tree: Path) -> Iterator[Path]:
    return (path for path in sorted(tree.rglob("*")) if path.is_file() and not path.is_symlink())


def _some(tests: list[str], number: int) -> list[str]:
    left = list(tests)
    return [left.pop(secrets.randbelow(len(left))) for _ in range(min(number, len(left)))]
