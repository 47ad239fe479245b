"""The limits of a test, and the supervision of the process that it runs in.

The address space is not limited, because importing torch maps three times the memory that it uses.
The private memory of a process is limited by `RLIMIT_DATA`: an allocation beyond it fails in the
process itself. The sum over all processes, with shared memory and page tables, is measured from
outside. `system_calls.py` forbids memory that no measure shows. Files in `/tmp` and `/dev/shm` have
limits of their own.

What a process says and its other output come through two pipes, with no file between. A student may
print as much as the time allows: of the output, only the end is kept.
"""

from __future__ import annotations

import os
import re
import resource
import select
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .sandbox import Isolation, kill_all

LARGEST = 1 << 22  # bytes that a process may say
LOG = 1 << 18  # bytes of output that are kept
PAUSE = 0.02  # seconds between two checks of a process
STALL = 0.5  # a longer pause than this is the machine's fault, and not the process's


@dataclass(frozen=True)
class Limits:
    """The limits of one test with all its processes."""

    seconds: float = 60.0  # of wall time; the limit of CPU time is somewhat higher
    memory: int = 3 << 30  # bytes of private memory
    file_size: int = 64 << 20  # bytes of each file that it writes
    disk: int = 256 << 20  # bytes of all its files
    processes: int = 64  # including threads


def apply(limits: Limits, *, own_processes: bool) -> None:
    """Limit this process and its children. The number of processes only if counted separately."""
    seconds = int(limits.seconds * 4) + 5
    values = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: limits.file_size,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 256,
    }
    if sys.platform == "linux":
        values[resource.RLIMIT_DATA] = limits.memory
        if own_processes:
            values[resource.RLIMIT_NPROC] = limits.processes
    for kind, value in values.items():
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))


def memory_of_all() -> int:
    """Return the bytes of all processes in this namespace, without this one and without files.

    Their page tables count: those of memory that is only read can be larger than the limit.
    """
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        if status.parent.name == str(os.getpid()):
            continue
        try:
            found = re.findall(r"(?:RssAnon|RssShmem|VmPTE):\s+(\d+) kB", status.read_text())
        except OSError:  # the process has ended
            continue
        total += sum(map(int, found)) * 1024
    return total


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


def supervise(
    child: int, says: Pipe, log: Pipe, silent: float, seconds: float, limits: Limits,
    isolation: Isolation,
) -> Heard:  # fmt: skip
    """Read what a child says until it ends, or is out of time or memory. Kill all its processes.

    It is out of time after `seconds`, or if it has said nothing for `silent` seconds.
    """
    now = time.monotonic()
    deadline, end, measured, how = now + silent, now + seconds, now, ""
    while not how:
        select.select([pipe.reader for pipe in (says, log) if pipe.open], [], [], PAUSE)
        before, now = now, time.monotonic()
        if now - before > STALL:  # the machine was stopped: the process gets this time back
            deadline, end = deadline + now - before, end + now - before
        heard = says.total
        for pipe in (says, log):
            pipe.read()
        deadline = now + silent if says.total > heard else deadline
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            how = _ending(status)
        elif now > min(deadline, end):
            how = "timeout"
        elif says.total > LARGEST:
            how = "it said too much"
        elif isolation.processes and now - measured > PAUSE:
            measured = now
            how = "memory" if memory_of_all() > limits.memory else ""
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
