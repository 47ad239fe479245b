"""`SupervisedRun`: the events of one process that runs tests, until it ends or is ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from . import stacks
from .results import Failure, Outcome, Result, Run, result_of

SECONDS = 60.0  # limit for each test
SECONDS_PLAIN = 10.0  # limit for each test of plain data
SECONDS_TO_COLLECT = 300.0  # imports are slow on a loaded machine
OnResult = Callable[[Result], None]
OnImport = Callable[[str], None]
MESSAGES: dict[Outcome, str] = {
    "timeout": "still running after {seconds:g} s: does a loop not end, or a thread wait for ever?",
    "crashed": "the process of the test ended: out of memory, or a crash in C code",
}
AFTER = "after the test passed: {}"
UNFINISHED = "pytest ended ({status}) before it ran {test} and {others} other tests"


class RunnerError(RuntimeError):
    """The process that runs tests did not start, or ended. The message has its last output."""


class TestServer(Protocol):
    """What a run uses of the `Runner`."""

    fork: bool

    def send(self, request: dict[str, Any]) -> None: ...
    def next_event(self, seconds: float) -> dict[str, Any] | None: ...
    def stop(self) -> None: ...
    def end_of_run(self) -> None: ...


class SupervisedRun:
    """One process that runs some tests until all are done or one of them ends the process."""

    def __init__(
        self,
        runner: TestServer,
        request: dict[str, Any],
        seconds: float | None,
        on_result: OnResult | None,
        on_import: OnImport | None = None,
    ) -> None:
        self.runner = runner
        self.request = request
        self.chosen_seconds = seconds
        self.seconds = SECONDS if seconds is None else seconds
        self.on_result = on_result
        self.on_import = on_import
        self.results: list[Result] = []
        self.collected: list[str] | None = None
        self.running: str | None = None
        self.pid: int | None = None
        self.lost: Result | None = None  # the result of the test that ended the process
        self.stacks = stacks.Stacks()  # of a test that did not end
        self.finished: dict[str, Any] | None = None

    @property
    def rest(self) -> list[str]:
        """The tests that have no result yet."""
        done = {result.node for result in self.results}
        return [node for node in self.collected or () if node not in done]

    def run(self) -> Run:
        """Send the request and read events until the run ends."""
        self.runner.send(self.request)
        ended: Outcome = "crashed"
        try:
            while True:
                limit = self.seconds if self.running else max(self.seconds, SECONDS_TO_COLLECT)
                event = self.runner.next_event(limit)
                if event is None:
                    ended = "timeout"
                    assert self.pid is not None
                    written = stacks.request(self.pid, Path(self.request["stacks"]))
                    self.stacks = stacks.told(written, Path(self.request["tree"]))
                    kill_group(self.pid)
                    if not self.runner.fork:
                        break
                elif self._heard(event):
                    break
        except RunnerError:
            if self.runner.fork:
                self.runner.stop()
                raise
        self.runner.end_of_run()
        return self._conclusion(ended)

    def _heard(self, event: dict[str, Any]) -> bool:
        """Handle an event. Return whether it is the last one."""
        kind = event["event"]
        if kind == "refused":
            raise RunnerError(event["reason"])
        if kind == "process":
            self.pid = event["pid"]
        elif kind == "collected":
            self.collected = event["nodes"]
            if self.chosen_seconds is None and event["plain"]:
                self.seconds = SECONDS_PLAIN
        elif kind == "importing" and self.on_import is not None:
            self.on_import(event["library"])
        elif kind == "start":
            self.running = event["node"]
        elif kind == "result":
            self.running = None
            self._add(result_of(event["result"]))
        elif kind == "finished":
            self.finished = event
        return kind == "exit" or (kind == "finished" and not self.runner.fork)

    def _add(self, result: Result) -> None:
        self.results.append(result)
        if self.on_result is not None:
            self.on_result(result)

    def _conclusion(self, ended: Outcome) -> Run:
        if self.finished is not None:
            output = str(self.finished["output"])
            status = self.finished["status"]
            # 0 and 1: all tests ran. 2: some tests could not be collected, which is also a result.
            wrong = status not in (0, 1) and not self.results
            error = (output.strip() or f"pytest ended with {status}") if wrong else None
            rest = [] if "--collect-only" in self.request["options"] else self.rest
            if rest and not self.results:
                error = UNFINISHED.format(status=status, test=rest[0], others=len(rest) - 1)
            elif rest:  # KeyboardInterrupt in a test, for example, ends pytest's loop
                self.lost = self.results[-1]
            return Run(error=error)
        message = MESSAGES[ended].format(seconds=self.seconds)
        if self.running is not None:
            self._add(Result(self.running, ended, failure=self._failure(ended, message)))
        elif not self.results:
            return Run(error=f"no test was started: {message}")
        elif self.results[-1].passed:  # damage to memory may end the process only after the test
            last = self.results.pop()
            failure = self._failure(ended, AFTER.format(message))
            self._add(replace(last, outcome=ended, failure=failure))
        self.lost = self.results[-1]
        return Run()

    def _failure(self, ended: Outcome, message: str) -> Failure:
        """Return the failure of a test that ended its process or did not end, with its stacks."""
        found = self.stacks
        return Failure(
            ended, message, where=found.where, test_line=found.test_line, stacks=found.text,
            trace=found.trace,
        )  # fmt: skip


def kill_group(pid: int) -> None:
    """Kill a process that leads a process group, and all processes of the group."""
    for end in (os.killpg, os.kill):
        try:
            end(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
