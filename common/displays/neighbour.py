"""Which other process uses the CPU beside a demo. The seconds of the demo are longer then."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 0.2  # how long the CPU is watched
NOTICED = 0.3  # of a core
PROC = Path("/proc")


def neighbour() -> str | None:
    """Return a line about the busiest other process; None if none of them uses much of a core."""
    name, share = _on_linux() if (PROC / "stat").exists() else _on_a_mac()
    if share < NOTICED:
        return None
    return (
        f"{name} uses {share:.0%} of a core beside this demo, so the demo's seconds are longer "
        "than usual. Virtual time does not change."
    )


def _on_linux() -> tuple[str, float]:
    """Watch the ticks of all processes for a moment. Return the busiest one, and its share."""
    before, started = _ticks(), time.perf_counter()
    time.sleep(SECONDS)
    ticks = os.sysconf("SC_CLK_TCK") * (time.perf_counter() - started)
    used = {process: now - before.get(process, now) for process, now in _ticks().items()}
    (pid, name), most = max(used.items(), key=lambda item: item[1], default=(("", ""), 0))
    return f"{name} (process {pid})", most / ticks


def _ticks() -> dict[tuple[str, str], int]:
    """Return the time that each other process has used, by its number and name."""
    found = {}
    for path in PROC.glob("[0-9]*/stat"):
        try:
            head, _, fields = path.read_text(errors="replace").rpartition(")")
        except OSError:  # it has ended
            continue
        pid, _, name = head.partition(" (")
        if pid != str(os.getpid()):
            used = fields.split()[11:13]  # in user and in system mode
            found[pid, name] = sum(map(int, used))
    return found


def _on_a_mac() -> tuple[str, float]:
    """Return the busiest process of the last minute, as `ps` says it."""
    if sys.platform == "win32":
        return "", 0.0
    listed = subprocess.run(
        ["ps", "-Ao", "pcpu=,pid=,comm="], capture_output=True, text=True, check=False
    ).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    others = [row for row in rows if len(row) == 3 and row[1] != str(os.getpid())]
    share, pid, name = max(others, key=lambda row: float(row[0]), default=["0", "", ""])
    return f"{Path(name).name} (process {pid})", float(share) / 100
