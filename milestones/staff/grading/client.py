"""The grader's side of the fork server: request exams, and receive what is said in them."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...course.delta import ROOT
from ...course.testing.results import Failure, Result, result_of
from ...course.testing.runner import ENVIRONMENT, ONE_THREAD
from ...course.testing.supervised_run import kill_group
from .limits import Limits
from .root import is_in_kept
from .sandbox import new_user

GRACE = 30.0  # seconds for an exam in addition to those of its tests
SECONDS_TO_COLLECT = 300.0
KEPT = ("PATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SYSTEMROOT", "LADDER_CPU")


class GraderError(RuntimeError):
    """The grader does not work: its process has ended, or the reference is not right in it."""


@dataclass
class Outcome:
    """What an exam gave: the answers, the claimed results of the tests, and facts about it."""

    results: list[Result] = field(default_factory=list)  # one for each requested test
    said: list[str] = field(default_factory=list)  # answers as they came: `answers.py` reads them
    ended: str = "no answer"  # why answers may be missing
    asked: bool = False  # whether the process that answers came to its end
    missing: list[str] = field(default_factory=list)  # what the graded code had access to
    broken: str | None = None  # why the exam ended too early, by no fault of the graded code
    endless_import: str | None = None  # where importing the graded code does not end


class ForkServer(AbstractContextManager["ForkServer"]):
    """The process that exams are forked from. A context manager; threads can share it."""

    def __init__(self, scratch: Path, *, bare: bool = False) -> None:
        self.scratch = scratch
        self.lock = threading.Lock()
        ours, theirs = socket.socketpair()
        environment = {key: os.environ[key] for key in KEPT if key in os.environ}
        environment |= {**ENVIRONMENT, **ONE_THREAD, "HOME": str(scratch), "TMPDIR": str(scratch)}
        environment |= {
            "USER": "student", "HF_HUB_OFFLINE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "CC": "none",  # otherwise each exam would compile the kernels in C in its own home
            "PYTHONUTF8": "1", "PYTHONHASHSEED": "0",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
        }  # fmt: skip
        self.running: int | None = None
        self.said: Any = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end)
        self.process = subprocess.Popen(
            [sys.executable, "-m", __package__ + ".fork_server", *(["--bare"] if bare else [])],
            cwd=ROOT, env=environment, start_new_session=True,
            stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self.said,
        )  # fmt: skip
        theirs.close()
        self.socket = ours
        # Threads wait for `stopped`, which ends when `running` is closed.
        self.stopped, self.running = os.pipe()
        self._expect(b"r")

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.socket.close()
        self.said.close()
        os.close(self.stopped)

    def stop(self) -> None:
        """End the process and all exams. A thread that waits for an exam waits no longer."""
        self.process.kill()
        self.process.wait()
        if self.running is not None:
            os.close(self.running)
            self.running = None

    def collect(self, tree: Path, tests: Iterable[str], exercise: str | None) -> list[str]:
        """Return the node ids of tests. Raises `GraderError`, also if there are no questions."""
        tests, words, nodes = [*tests], "", None
        order = {"tests": tests, "exercise": exercise, "trusted": True}
        for event in self._events(tree, order, Limits(), SECONDS_TO_COLLECT):
            words = str(event.get("words") or event.get("reason") or words)
            if event["event"] == "collected" and event.get("status", 0) == 0:
                nodes = [str(node) for node in event.get("nodes", ())]
        if nodes is None:
            about = ", ".join([*tests, *([exercise] if exercise else [])])
            raise GraderError(f"{about}: cannot be collected in the reference:\n{words}")
        return nodes

    def examine(
        self, tree: Path, tests: Iterable[str], limits: Limits, hidden: Iterable[Path],
        exercise: str | None = None, seed: int = 0,
    ) -> Outcome:  # fmt: skip
        """Run an exam. A test without a result gets one that says why."""
        tests, outcome = [*tests], Outcome()
        order = {
            "tests": tests, "exercise": exercise, "seed": seed, "trusted": False,
            "hidden": [str(path) for path in hidden if is_in_kept(path)], "user": new_user(),
        }  # fmt: skip
        seconds, stopped, finished = GRACE + (len(tests) + 3) * (limits.seconds + 2), "", False
        for event in self._events(tree, order, limits, seconds):
            kind = event["event"]
            if kind == "result":
                outcome.results.append(result_of(event["result"]))
            elif kind == "answer":
                outcome.said.append(event["text"])
            elif kind == "asked":
                place = f", at {event['place']}" if event["place"] else ""
                outcome.asked = event["how"] == "exit status 0"
                outcome.ended = f"no answer: the process ended by {event['how']}{place}"
            elif kind == "isolation":
                outcome.missing = list(event["missing"])
            elif kind == "broken":
                outcome.broken = str(event["reason"])
            elif kind == "stopped":
                stopped = str(event["reason"])
                outcome.endless_import = stopped if event.get("import") else None
            finished = finished or kind == "finished"
        if not finished:
            outcome.broken = stopped = outcome.broken or "the exam ended before its last test"
        done = {result.node for result in outcome.results}
        failure = Failure("NotRun", f"this test was not run: {stopped}")
        left = [test for test in tests if test not in done]
        outcome.results += [Result(test, "error", failure=failure) for test in left]
        return outcome

    def _events(
        self, tree: Path, order: dict[str, Any], limits: Limits, seconds: float
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of a job until it ends. A job that takes too long is killed."""
        reader, writer = socket.socketpair()
        handle, name = tempfile.mkstemp(dir=self.scratch, suffix=".json")
        with os.fdopen(handle, "w") as file:
            json.dump({**order, "tree": str(tree), "limits": asdict(limits)}, file)
        with self.lock:
            socket.send_fds(self.socket, [os.fsencode(name)], [writer.fileno()])
            self._expect(b"a")
        writer.close()
        pid, deadline, data, ended = None, time.monotonic() + seconds, b"", False
        try:
            while True:
                left = max(0.0, deadline - time.monotonic())
                ready = select.select([reader.fileno(), self.stopped], [], [], left)[0]
                if reader.fileno() not in ready:
                    return
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
            os.unlink(name)
            if pid is not None and not ended:
                kill_group(pid)

    def _expect(self, wanted: bytes) -> None:
        if self.socket.recv(1) != wanted:
            self.said.seek(0)
            words = self.said.read().decode(errors="replace")[-2000:]
            raise GraderError(f"the process that exams are forked from has ended:\n{words}")
