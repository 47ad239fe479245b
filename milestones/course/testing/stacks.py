"""The stacks of all threads of a test that does not end. They show where it waits.

The process of the test writes them when it gets a signal. It does so even while its threads wait
for locks, or compute in C. Then the process is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

SECONDS = 3.0  # how long a process has to write its stacks
DEEPEST = 8  # frames of a thread that are shown
THREAD = re.compile(r"^(?:Current thread|Thread) \S+", re.MULTILINE)
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


@dataclass(frozen=True)
class Stacks:
    """The stacks as a text, one thread after the other, and the lines that matter most."""

    text: str = ""
    where: str | None = None  # the line of the engine in the thread of the test
    test_line: str | None = None
    trace: str = ""  # all frames of all threads, as they were written


def write_on_signal(path: str) -> None:
    """Let this process write the stacks of its threads to a file when it gets SIGUSR1."""
    if hasattr(faulthandler, "register"):  # not on Windows
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)  # open until the process ends
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def request(pid: int, path: Path) -> str:
    """Signal a process that has called `write_on_signal`, and return what it has written."""
    path.write_bytes(b"")
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGUSR1)
    deadline, written = time.monotonic() + SECONDS, ""
    while time.monotonic() < deadline:
        time.sleep(0.05)
        before, written = written, path.read_text(encoding="utf-8", errors="replace")
        if written and written == before:
            break
    return written


def told(written: str, tree: Path) -> Stacks:
    """Return the stacks with the frames of a tree only. The thread of the test comes first."""
    threads = []
    for part in THREAD.split(written)[1:]:
        frames = [(Path(file), line, name) for file, line, name in FRAME.findall(part)]
        inside = [
            (file.relative_to(tree), f"{file.relative_to(tree)}:{line} in {name}")
            for file, line, name in frames
            if tree in file.parents and "site-packages" not in file.parts
        ]
        if inside and inside[0][0].parts[:2] != ("milestones", "course"):
            threads.append(inside)
    threads.sort(key=lambda thread: not any(file.parts[0] == "tests" for file, _ in thread))
    if not threads:
        return Stacks(trace=written)
    code = [place for file, place in threads[0] if file.parts[0] != "tests"]
    tests = [place for file, place in threads[0] if file.parts[0] == "tests"]
    blocks = [
        f"thread {number} of {len(threads)}, innermost call first\n"
        + "\n".join(f"  {place}" for _, place in thread[:DEEPEST])
        for number, thread in enumerate(threads, start=1)
    ]
    where, test_line = (places[0] if places else None for places in (code, tests))
    return Stacks("\n".join(blocks), where, test_line, written)
