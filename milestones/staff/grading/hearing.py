"""Hear what a process with graded code says, and end it: through two pipes, with no file between.

One pipe has the answers or the result, the other one has all other output. A student may print as
much as the time allows: of the output, only the end is kept.
"""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass

from . import limits as limits_of
from .limits import Limits
from .sandbox import Isolation, kill_all

LARGEST = 1 << 20  # bytes that a process may say
LOG = 1 << 18  # bytes of output that are kept
PAUSE = 0.02  # seconds between two checks of a process
STALL = 0.5  # a longer pause than this is the machine's fault, and not the process's


@dataclass(frozen=True)
class Heard:
    """What a process said, how it ended, and the end of its output."""

    lines: list[bytes]
    how: str
    log: str


class Pipe:
    """A pipe from a process. `kept` is the part of the bytes that is kept."""

    def __init__(self, kept: slice) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.kept = kept
        self.data = b""
        self.total = 0
        self.open = True  # whether a process may still write

    def read(self) -> None:
        """Take what is there, without waiting for more."""
        for _ in range(64):  # then look at the process again: it may write without end
            try:
                part = os.read(self.reader, 1 << 16)
            except BlockingIOError:
                return
            if not part:
                self.open = False
                return
            self.total += len(part)
            self.data = (self.data + part)[self.kept]

    def close(self) -> None:
        os.close(self.reader)


def hear(
    child: int, says: Pipe, log: Pipe, seconds: float, limits: Limits, isolation: Isolation
) -> Heard:
    """Listen to a child until it ends, or is out of time or memory. Kill all its processes."""
    now = time.monotonic()
    deadline, measured, how = now + seconds, now, ""
    while not how:
        select.select([pipe.reader for pipe in (says, log) if pipe.open], [], [], PAUSE)
        before, now = now, time.monotonic()
        if now - before > STALL:  # the machine was stopped: the process gets this time back
            deadline += now - before
        for pipe in (says, log):
            pipe.read()
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            how = _ending(status)
        elif now > deadline:
            how = "timeout"
        elif says.total > LARGEST:
            how = "it said too much"
        elif isolation.processes and now - measured > PAUSE:
            measured = now
            how = "memory" if limits_of.memory_of_all() > limits.memory else ""
    kill_all(isolation, child)
    _reap()
    for pipe in (says, log):
        pipe.read()
        pipe.close()
    return Heard(says.data.splitlines(), how, log.data.decode(errors="replace"))


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _reap() -> None:
    """Wait for all children. They have been killed."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
