"""The grader's side of the fork_server: request exams, and receive their results."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from ..delta import ROOT
from ..testing.results import Failure, Result, result_of
from ..testing.runner import ENVIRONMENT, ONE_THREAD
from .limits import Limits

GRACE = 30.0  # seconds for an exam in addition to those of its tests
KEPT = ("PATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SYSTEMROOT")


@dataclass
class Outcome:
    """The results of an exam, one for each requested test, and facts about the exam."""

    results: list[Result] = field(default_factory=list)
    forged: str | None = None  # the canary that was reported as passed
    missing: list[str] = field(default_factory=list)  # what the graded code had access to
    broken: str | None = None  # why the exam ended too early


class ForkServer:
    """The process that exams are forked from. A context manager; threads can share it."""

    def __init__(self, scratch: Path, *, bare: bool = False, namespaces: bool = True) -> None:
        self.scratch = scratch
        self.namespaces = namespaces
        self.lock = threading.Lock()
        self.slots = iter(range(1 << 20))
        ours, theirs = socket.socketpair()
        environment = {key: os.environ[key] for key in KEPT if key in os.environ}
        environment |= {**ENVIRONMENT, **ONE_THREAD, "HOME": str(scratch), "TMPDIR": str(scratch)}
        environment |= {
            "USER": "student", "HF_HUB_OFFLINE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "CC": "none",  # otherwise each exam would compile the kernels in C in its own home
            "PYTHONHASHSEED": "0", "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
        }  # fmt: skip
        self.said: Any = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end)
        self.process = subprocess.Popen(
            [sys.executable, "-m", __package__ + ".fork_server", *(["--bare"] if bare else [])],
            cwd=ROOT, env=environment, start_new_session=True,
            stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self.said,
        )  # fmt: skip
        theirs.close()
        self.socket = ours
        self._expect(b"r")

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.socket.close()
        self.process.kill()
        self.process.wait()
        self.said.close()

    def collect(self, tree: Path, tests: Iterable[str]) -> list[str]:
        """Return the node ids of tests in a tree without a student's code."""
        tests, words = [*tests], ""
        for event in self._events(tree, tests, Limits(), (), collect=True, seconds=300):
            if event["event"] == "collected" and event["status"] == 0:
                return [str(node) for node in event["nodes"]]
            words = str(event.get("words") or event.get("reason") or words)
        raise ValueError(f"{', '.join(tests)}: cannot collect from the reference:\n{words}")

    def examine(
        self, tree: Path, tests: Iterable[str], limits: Limits, hidden: Iterable[Path]
    ) -> Outcome:
        """Run an exam. A test without a result gets one that says why."""
        tests, outcome = [*tests], Outcome()
        seconds = GRACE + (len(tests) + 3) * (limits.seconds + 2)
        for event in self._events(tree, tests, limits, hidden, seconds=seconds):
            if event["event"] == "result":
                outcome.results.append(result_of(event["result"]))
            elif event["event"] == "forged":
                outcome.forged = str(event["test"])
            elif event["event"] == "isolation":
                outcome.missing = list(event["missing"])
            elif event["event"] == "broken":
                outcome.broken = str(event["reason"])
            elif event["event"] == "finished":
                return outcome
        outcome.broken = outcome.broken or "the exam ended before its last test"
        done = {result.node for result in outcome.results}
        failure = Failure("NotRun", f"this test was not run: {outcome.broken}")
        left = [test for test in tests if test not in done]
        outcome.results += [Result(test, "error", failure=failure) for test in left]
        return outcome

    def _events(
        self, tree: Path, tests: Iterable[str], limits: Limits, hidden: Iterable[Path], *,
        seconds: float, collect: bool = False,
    ) -> Iterator[dict[str, Any]]:  # fmt: skip
        """Yield the events of a job until it ends. A job that takes too long is killed."""
        reader, writer = socket.socketpair()
        order = {
            "tree": str(tree), "tests": [*tests], "limits": asdict(limits), "collect": collect,
            "hidden": [str(path) for path in hidden], "slot": next(self.slots),
            "namespaces": self.namespaces,
        }  # fmt: skip
        handle, name = tempfile.mkstemp(dir=self.scratch, suffix=".json")
        with os.fdopen(handle, "w") as file:
            json.dump(order, file)
        with self.lock:
            socket.send_fds(self.socket, [os.fsencode(name)], [writer.fileno()])
            self._expect(b"a")
        writer.close()
        pid, deadline, data, ended = None, time.monotonic() + seconds, b"", False
        try:
            while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
                part = reader.recv(1 << 16)
                ended = not part
                if ended:
                    return
                *lines, data = (data + part).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    pid = event["pid"] if event["event"] == "process" else pid
                    yield event
        finally:
            reader.close()
            if pid is not None and not ended:
                _kill(pid)

    def _expect(self, wanted: bytes) -> None:
        if self.socket.recv(1) != wanted:
            self.said.seek(0)
            words = self.said.read().decode(errors="replace")[-2000:]
            raise ValueError(f"the process that exams are forked from has ended:\n{words}")


def _kill(pid: int) -> None:
    for end in (os.killpg, os.kill):
        try:
            end(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
