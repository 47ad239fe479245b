"""`Inbox`: messages from a process that may stop in the middle of one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Inbox:
    """Reads messages in a thread.

    A long message does not fit into a socket, so reading it waits for the process that writes it.
    The decode side must not wait with it: this process may have stopped.
    """

    def __init__(self, connection: Connection, on_change: Callable[[], None]) -> None:
        """on_change: called by the thread for each message, and at the end of the connection."""
        self.connection, self.on_change = connection, on_change
        self.messages: deque[Any] = deque()
        self.is_closed = False  # after it is set, no message is added
        self.thread = threading.Thread(target=self._read, name="inbox", daemon=True)
        self.thread.start()

    def take(self) -> tuple[list[Any], bool]:
        """Return the messages that have arrived, and whether no more will come."""
        is_closed = self.is_closed  # read first: a message may arrive now
        return [self.messages.popleft() for _ in range(len(self.messages))], is_closed

    def close(self) -> None:
        """Wait for the thread, and close the connection. The process has ended."""
        self.thread.join()
        self.connection.close()

    def _read(self) -> None:
        try:
            while True:
                self.messages.append(self.connection.recv())
                self.on_change()
        except (EOFError, OSError):
            self.is_closed = True
            self.on_change()
