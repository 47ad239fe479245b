"""Other busy programs, beside which an engine is measured: a laptop is never idle."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Return a context in which endless loops run, each in a session of its own.

    Linux shares the cores between sessions, so such a loop gets as much time as a whole engine.
    """
    loop = ["sh", "-c", "while :; do :; done"]
    programs = [subprocess.Popen(loop, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()
