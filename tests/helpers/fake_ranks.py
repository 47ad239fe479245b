"""Ranks as threads of the test's process: they start at once, and a test can break one of them."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from multiprocessing.connection import Connection

from common.parallel import worker


class ThreadRank:
    """A rank in a thread. It has the methods of `subprocess.Popen` that `RankGroup` uses."""

    def __init__(self, theirs: socket.socket, num_threads: int) -> None:
        connection = Connection(os.dup(theirs.fileno()))
        self.thread = threading.Thread(target=worker.serve, args=(connection,), daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed. It ends when its connections close."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the thread, as `Popen.wait` waits for a process."""
        self.thread.join(timeout)
        if self.thread.is_alive():
            raise subprocess.TimeoutExpired("a rank in a thread", timeout or 0.0)
        return 0
