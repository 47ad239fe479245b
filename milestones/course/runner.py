"""`Runner`: runs pytest tests in a tree, in processes of their own, and returns data.

    with Runner() as runner:                    # one process imports torch, once
        run = runner.run(tree, ["tests/exercises/test_m3_2.py"])
        print(run.passed, run.first_failure)

A tree is a folder like the root of this project. A test that hangs or crashes its process costs
that test: the others are run in another one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from ..delta import ROOT
from .results import Failure, Outcome, Result, Run, result_of

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",  # as tests/conftest.py: decided when Triton is imported
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for a GPU must not start CUDA: forks could not
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
SECONDS = 60.0  # for a test
SECONDS_TO_COLLECT = 300.0  # imports on a loaded machine

OnResult = Callable[[Result], None]
MESSAGES: dict[Outcome, str] = {
    "timeout": "still running after {seconds:g} s: a loop that does not end?",
    "crashed": "the process that ran it ended: out of memory, or a crash in C code",
}


class RunnerError(RuntimeError):
    """The process that runs tests did not start, or ended; the message has its last words."""


class Runner:
    """A process that runs tests; a context manager, which ends it.

    With `fork`, which is the default where it is safe (Linux), it imports torch and the other big
    libraries once and runs each tree in a fork: a tenth of a second instead of many. Without, each
    run has a fresh process, with as many threads as the machine has cores.
    """

    def __init__(self, *, fork: bool = sys.platform == "linux") -> None:
        self.fork = fork
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._said: Any = None  # what the process prints
        self._hypothesis = tempfile.TemporaryDirectory(prefix="ladder-hypothesis-")

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """End the process."""
        self._stop()
        self._hypothesis.cleanup()

    def run(
        self,
        tree: Path,
        tests: Iterable[str],
        *,
        seconds: float = SECONDS,
        memory: int | None = None,
        options: Iterable[str] = (),
        on_result: OnResult | None = None,
    ) -> Run:
        """Run tests (files or node ids) of a tree: each within `seconds`, in `memory` bytes.

        `options` are more options for pytest, `on_result` hears of each result as it comes.
        """
        request = {"tree": str(Path(tree).resolve()), "memory": memory, "options": [*options]}
        results: list[Result] = []
        todo: list[str] = [*tests]
        run = Run()
        while todo:
            attempt = _Attempt(self, {**request, "tests": todo}, seconds, on_result)
            run = attempt.run()
            results += attempt.results
            if attempt.lost is None:
                break
            todo = attempt.rest
        return Run(tuple(results), run.error, run.output)

    @property
    def cold(self) -> bool:
        """Whether the next run must wait for imports."""
        return self._process is None

    def start(self) -> None:
        """Start the process, if it does not run; imports take some seconds."""
        if self._process is not None:
            return
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        arguments = ["-m", "milestones.course.server", *([] if self.fork else ["--once"])]
        environment = {**os.environ, **ENVIRONMENT, **(ONE_THREAD if self.fork else {})}
        environment["HYPOTHESIS_STORAGE_DIRECTORY"] = self._hypothesis.name
        self._process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=environment, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, bufsize=0,
        )  # fmt: skip
        self._buffer = b""
        self.next_event(SECONDS_TO_COLLECT)

    def send(self, request: dict[str, Any]) -> None:
        """Ask for a run."""
        self.start()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")

    def next_event(self, seconds: float) -> dict[str, Any] | None:
        """The next event; None where none comes in time. Raises `RunnerError` at the end."""
        assert self._process is not None and self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                return None
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise RunnerError(f"the process that runs tests has ended\n{self._last_words()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        return event

    def end_of_run(self) -> None:
        """Where processes are not forked, each runs once."""
        if not self.fork:
            self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        kill_group(process.pid)
        process.wait()
        process.stdout.close()
        self._said.close()

    def _last_words(self) -> str:
        self._said.seek(0)
        words: str = self._said.read().decode(errors="replace")[-2000:]
        return words


class _Attempt:
    """One process that runs some tests, as far as it gets."""

    def __init__(
        self, runner: Runner, request: dict[str, Any], seconds: float, on_result: OnResult | None
    ) -> None:
        self.runner = runner
        self.request = request
        self.seconds = seconds
        self.on_result = on_result
        self.results: list[Result] = []
        self.collected: list[str] | None = None
        self.running: str | None = None
        self.pid: int | None = None
        self.lost: Result | None = None  # the test that ended the process
        self.finished: dict[str, Any] | None = None

    @property
    def rest(self) -> list[str]:
        """The tests that have no result yet."""
        done = {result.node for result in self.results}
        return [node for node in self.collected or () if node not in done]

    def run(self) -> Run:
        """Send the request and hear all there is to hear."""
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
                self.runner._stop()
                raise
        self.runner.end_of_run()
        return self._conclusion(ended)

    def _heard(self, event: dict[str, Any]) -> bool:
        """Take an event in; whether it is the last."""
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
            # 0 and 1: all tests ran; 2: some could not be collected, which is a result.
            wrong = status not in (0, 1) and not self.results
            return Run(error=output.strip() or f"pytest ended with {status}" if wrong else None,
                       output=output)  # fmt: skip
        message = MESSAGES[ended].format(seconds=self.seconds)
        if self.running is None:
            return Run(error=f"no test has begun, or all had ended: {message}")
        self.lost = Result(self.running, ended, failure=Failure(ended, message))
        self._add(self.lost)
        return Run()


def kill_group(pid: int) -> None:
    """End a process that leads a group, and all it has started."""
    for end in (os.killpg, os.kill):
        try:
            end(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
