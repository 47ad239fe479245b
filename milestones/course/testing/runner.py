"""`Runner`: runs the tests of a tree with pytest, in other processes, and returns data.

    with Runner() as runner:                    # one process imports torch, once
        run = runner.run(tree, ["tests/exercises/test_m3_2.py"])
        print(run.passed, run.first_failure)

A tree is a folder like the root of this project. If a test hangs or crashes its process, only that
test is lost: the others run in a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..delta import ROOT
from .results import Result, Run
from .supervised_run import (
    SECONDS_TO_COLLECT,
    OnImport,
    OnResult,
    RunnerError,
    SupervisedRun,
    kill_group,
)

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",  # as in tests/conftest.py: Triton reads it when it is imported
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # look for a GPU without starting CUDA: forks need that
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
SECONDS_TO_END = 5.0


class Runner(contextlib.AbstractContextManager["Runner"]):
    """A process that runs tests. As a context manager, it ends the process.

    With `fork`, which is the default where it is safe (Linux), the process imports pytest once, and
    torch and transformers once when a test needs them. Each run is then a fork, which starts in a
    tenth of a second instead of many seconds. Without `fork`, each run has a new process with as
    many threads as cores.
    """

    def __init__(self, *, fork: bool = sys.platform == "linux") -> None:
        self.fork = fork
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._said: Any = None  # the output of the process
        self._folder = tempfile.TemporaryDirectory(prefix="ladder-runner-")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, and remove temporary files."""
        self.stop()
        self._folder.cleanup()

    def run(
        self,
        tree: Path,
        tests: Iterable[str],
        *,
        seconds: float | None = None,
        options: Iterable[str] = (),
        on_result: OnResult | None = None,
        on_import: OnImport | None = None,
        stop_at_timeout: bool = False,
    ) -> Run:
        """Run tests (files or node ids) of a tree, each within `seconds`.

        By default, tests of plain data have 10 seconds, and others 60. `options` are more options
        for pytest. `on_result` is called with each result as it comes, and `on_import` with the
        name of a big library before it is imported.
        With `stop_at_timeout`, no test is run after one that does not end.
        """
        request = {
            "tree": str(Path(tree).resolve()), "options": [*options],
            "stacks": str(Path(self._folder.name) / "stacks.txt"),
        }  # fmt: skip
        results: list[Result] = []
        todo: list[str] = [*tests]
        run = Run()
        while todo:
            part = SupervisedRun(self, {**request, "tests": todo}, seconds, on_result, on_import)
            run = part.run()
            results += part.results
            if part.lost is None:
                break
            todo = part.rest
            if stop_at_timeout and part.lost.outcome == "timeout":
                return Run(tuple(results), run.error, tuple(todo))
        return Run(tuple(results), run.error)

    def start(self) -> None:
        """Start the process if it does not run."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            self.stop()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        arguments = ["-m", "milestones.course.testing.server", *([] if self.fork else ["--once"])]
        environment = {**os.environ, **ENVIRONMENT, **(ONE_THREAD if self.fork else {})}
        environment["HYPOTHESIS_STORAGE_DIRECTORY"] = self._folder.name
        self._process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=environment, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, bufsize=0,
        )  # fmt: skip
        self._buffer = b""
        if self.next_event(SECONDS_TO_COLLECT) is None:
            self.stop()
            raise RunnerError(f"imports took more than {SECONDS_TO_COLLECT:g} s: no test was run")

    def send(self, request: dict[str, Any]) -> None:
        """Request a run."""
        self.start()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")

    def next_event(self, seconds: float) -> dict[str, Any] | None:
        """Return the next event, or None if none comes in time. Raises `RunnerError` at the end."""
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
        """End the process of a run, unless the process forks: it then serves the next run too."""
        if not self.fork:
            self.stop()

    def stop(self) -> None:
        """End the process. The next run starts a new one."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()  # a server that forks ends when its input ends, and kills its fork
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END if self.fork else 0)
        kill_group(process.pid)
        process.wait()
        process.stdout.close()
        self._said.close()

    def _last_words(self) -> str:
        self._said.seek(0)
        words: str = self._said.read().decode(errors="replace")[-2000:]
        return words
