"""`Trial`: a process that compiles a grammar before the engine's process does, with limits.

The system ends it when it needs too much: of processor time, so that the verdict does not depend on
what else the machine does, and of memory.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS = 2  # of processor time for one grammar
MEGABYTES = 200  # for all grammars that the process has compiled
SCRIPT = Path(__file__).with_name("grammar_compile.py")


class TrialEndedError(Exception):
    """The process was ended from outside. This says nothing about the grammar."""


class Trial:
    """One process. It starts with a grammar, and again after one that it did not survive."""

    def __init__(self, head: dict[str, Any]) -> None:
        """head: of the tokenizer, as `grammar_compile.main` reads it."""
        self._head = {**head, "seconds": SECONDS, "bytes": MEGABYTES << 20}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_stopped = False

    def check(self, given: dict[str, Any]) -> None:
        """Compile a grammar, given as a dict. Raises `ValueError` if it is bad or too expensive."""
        if self._process is None and not self._ask(self._head):
            raise RuntimeError(f"the process that tries grammars does not start: {self._end()}")
        if answer := self._ask(given):
            if error := json.loads(answer):
                raise ValueError(error)
            return
        limit = f"{MEGABYTES} MB of memory"
        if (status := self._end()) == -signal.SIGXCPU:
            limit = f"{SECONDS} s of processor time"
        raise ValueError(
            f"structured_outputs cannot be compiled: it needs more than {limit} (status {status})"
        )

    def stop(self) -> None:
        """End the process, for good. A grammar that it compiles raises `TrialEndedError`.

        Any thread may call this.
        """
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """End a process that compiles nothing, and wait for its end."""
        self.stop()
        if self._process is not None:
            with suppress(TrialEndedError):
                self._end()

    def _ask(self, message: dict[str, Any]) -> str:
        """Send a message, and return the answer: a line, or nothing if the process has ended."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            return process.stdout.readline()
        return ""

    def _started(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._is_stopped:
                raise TrialEndedError("the compilation was ended")
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", str(SCRIPT)], text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            return self._process

    def _end(self) -> int:
        """Wait for the end of the process, and return its status. The next one is a new one."""
        with self._lock:
            process, self._process = self._process, None
        assert process is not None, "only a process that was started can end"
        with process:  # closes the pipes
            status = process.wait()
        if self._is_stopped:
            raise TrialEndedError("the compilation was ended")
        return status
