"""An exam: the tests of one exercise, each in a process of its own, judged from outside.

The examiner runs no graded code. It knows which tests there are, forks a process for each, and
hears a claim: collected, outcome, what was replaced. A claim counts if it is the only one, carries
the token of that process, speaks of that test, and nothing was replaced. A process that ends
without one has crashed, whatever its exit status; one that is late is killed with all it started.

Canaries: tests that passed are run again with a failure behind their last line. If one of those is
reported as passed, nothing that this code reported can be believed.

What that leaves: code that runs in the test's own process and knows this file can find the token
and the plugin in memory, and tell the truth about canaries and a lie about the rest; a value whose
class says that it equals everything passes what only compares. No check inside that process can
rule it out. `gate.py` refuses the plain means for it, with line and reason; what is hidden better
is for a person to find: the submission is there to be read.
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

from ..results import Failure, Result, result_of
from . import limits as limits_of
from .examinee import sit
from .limits import Limits
from .sandbox import Isolation, give_up_rights, kill_all

NUM_CANARIES = 2
LARGEST_CLAIM = 1 << 20  # bytes
PAUSE = 0.02  # seconds between two looks at a test
STALL = 0.5  # seconds between two looks that no test is to blame for
LOG = 4000  # characters of output that are kept
Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Exam:
    """What to run, where, and how it may behave."""

    tree: Path
    tests: tuple[str, ...]
    limits: Limits


class Examiner:
    """Runs an exam in a process that `sandbox.shut_off` has shut off."""

    def __init__(self, exam: Exam, isolation: Isolation, emit: Emit) -> None:
        self.exam = exam
        self.isolation = isolation
        self.emit = emit
        self.files = {path: path.read_bytes() for path in _files(exam.tree)}

    def run(self) -> None:
        """Emit a result for each test, then what the canaries showed."""
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
        """One test in one process; the result is this process's own judgement."""
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
            message = f"it changed files of the tests' tree: {', '.join(changed[:5])}"
            return replace(result, outcome="error", failure=Failure("Tampered", message))
        return result

    def _be_examined(
        self, test: str, claims: int, log: int, token: str, canary: str | None
    ) -> None:
        """In the child: no way back to the examiner but the claim."""
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
        """What the child claims until it ends, and how it ended; nothing of it lives on."""
        os.set_blocking(reader, False)
        deadline = time.monotonic() + self.exam.limits.seconds
        heard, how, looked = b"", "", time.monotonic()
        while not how:
            select.select([reader], [], [], PAUSE)
            now = time.monotonic()
            if now - looked > STALL:  # the examiner was stopped too: the machine's fault
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
        """Undo what graded code did to the tree, where it could; the files that it changed."""
        if self.isolation.files:  # it could not: the tree is mounted read-only
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
    """The result of a test, from what its process claimed and how it ended."""

    def lost(outcome: str, kind: str, message: str) -> Result:
        return result_of(
            {"node": test, "outcome": outcome,
             "failure": {**asdict(Failure(kind, message)), "trace": said}}
        )  # fmt: skip

    if how == "timeout":
        return lost("timeout", "timeout", "still running when its time was up: a loop without end?")
    if how == "memory":
        return lost("crashed", "memory", "its processes took more memory than the limit")
    lines = claim.splitlines()
    if not lines:
        return lost("crashed", "crashed", f"the test's process ended before the test did ({how})")
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
        return lost("error", "Tampered", "somebody else spoke for the test's process")
    if problems:
        return lost("error", "Tampered", "; ".join(problems[:5]))
    if failed := [result for result in results if not result.passed]:
        return replace(failed[0], node=test)
    if not results:
        internal = re.findall(r"^INTERNALERROR> (\S.*)", said, re.MULTILINE)
        return lost("error", "ended", internal[-1] if internal else ended)
    if not (about and finished and [result.node for result in results] == [test]):
        return lost("error", "Tampered", "a test is said to have passed, and did not run")
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
    """Wait for all children, which have been killed."""
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
