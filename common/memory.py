"""How much main memory this process may still take."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")  # limits of a container, as the process in it sees them
# The limit and the usage, in version 2 and in version 1 of Linux's control groups.
FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroups: Path = CGROUPS) -> int:
    """Return bytes: what the machine has left, or what its container leaves this process, if less.

    Caches of files count as free, because the system gives them back.
    """
    try:
        lines = meminfo.read_text(encoding="utf-8").splitlines()
        left = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):  # other systems do not say how much is free
        left = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return min(left, *(_left(cgroups / limit, cgroups / usage) for limit, usage in FILES))


def _left(limit: Path, usage: Path) -> int:
    """Return the bytes that a control group leaves; a huge number if it has no limit."""
    try:
        most, used = int(limit.read_text()), int(usage.read_text())
        counts = dict(x.split() for x in (limit.parent / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container; or the limit is `max`, which is none
        return 2**63
    files = counts.get("total_inactive_file") or counts.get("inactive_file") or 0
    return max(0, most - used + int(files))
