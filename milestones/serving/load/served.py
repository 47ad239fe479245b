"""Serve an engine in a process of its own, while this process sends the requests."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...chain import ROOT

URL = re.compile(r"serves .* at (http://\S+/v1)")
SECONDS = 30.0  # for an orderly end; after that the process is killed


@contextmanager
def served(engine: str, options: Sequence[str]) -> Iterator[str]:
    """Serve an engine on a free port of 127.0.0.1, and yield the URL of its API.

    options: of `python -m milestones serve`. Raises `RuntimeError` with the server's message if it
    does not start.
    """
    command = [sys.executable, "-m", "milestones", "serve", engine, "--port", "0", *options]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield _url(process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=SECONDS)  # it also reads what the server still prints
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        if found := URL.search(line):
            return found[1]
        said.append(line)
    raise RuntimeError("the server did not start:\n" + "".join(said).rstrip())
