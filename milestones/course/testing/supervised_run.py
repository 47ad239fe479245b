"""`SupervisedRun`: the events of one process that runs tests, until it ends or is ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from .results import Failure, Outcome, Result, Run, result_of

SECONDS_TO_COLLECT = 300.0  # imports are slow on a loaded machine
OnResult = Callable[[Result], None]
MESSAGES: dict[Outcome, str] = {
    "timeout": "still running after {seconds:g} s: is there a loop that does not end?",
    "crashed": "the process of the test ended: out of memory, or a crash in C code",
}
AFTER = "after the test passed: {}"


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
        seconds: float,
        on_result: OnResult | None,
    ) -> None:
        self.runner = runner
        self.request = request
        self.seconds = seconds
        self.on_result = on_result
        self.results: list[Result] = []
        self.collected: list[str] | None = None
        self.running: str | None = None
        self.pid: int | None = None
        self.lost: Result | None = None  # the result of the test that ended the process
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
            return Run(error=output.strip() or f"pytest ended with {status}" if wrong else None,
                       output=output)  # fmt: skip
        message = MESSAGES[ended].format(seconds=self.seconds)
        if self.running is not None:
            self._add(Result(self.running, ended, failure=Failure(ended, message)))
        elif not self.results:
            return Run(error=f"no test was started: {message}")
        elif self.results[-1].passed:  # damage to memory may end the process only after the test
            last = self.results.pop()
            self._add(replace(last, outcome=ended, failure=Failure(ended, AFTER.format(message))))
        self.lost = self.results[-1]
        return Run()


def kill_group(pid: int) -> None:
    """Kill a process that leads a process group, and all processes of the group."""
    for end in (os.killpg, os.kill):
        try:
            end(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
