"""Limits of a test, and what its processes use of them.

Address space is no measure here: importing torch maps three times what it uses. Private memory
(`RLIMIT_DATA`) is what a process asks for, and an allocation beyond it fails at once in the process
itself; the sum over all processes is watched from outside.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Limits:
    """Of one test, with all it starts."""

    seconds: float = 60.0  # on the clock; of a processor, somewhat more
    memory: int = 3 << 30  # bytes, private
    file_size: int = 64 << 20  # bytes of a file that it writes
    disk: int = 256 << 20  # bytes of all of them
    processes: int = 64  # threads count


def apply(limits: Limits, *, own_processes: bool) -> None:
    """To this process and its children; how many there are, where they are counted alone."""
    seconds = int(limits.seconds * 2) + 5
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
    """Private bytes of all processes that this one sees, itself apart: those of its namespace."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        if status.parent.name == str(os.getpid()):
            continue
        try:
            found = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
        except OSError:  # it has ended
            continue
        total += int(found[1]) * 1024 if found else 0
    return total
