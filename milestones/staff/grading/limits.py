"""The limits of a test, and the memory that its processes use.

The address space is not limited, because importing torch maps three times the memory that it uses.
The private memory of a process is limited by `RLIMIT_DATA`: an allocation beyond it fails in the
process itself. The sum over all processes, with shared memory and page tables, is measured from
outside. `system_calls.py` forbids memory that no measure shows. Files in `/tmp` and `/dev/shm` have
limits of their own.
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
