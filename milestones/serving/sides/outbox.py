"""`Outbox`: messages to a process that may not read them."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Outbox:
    """Sends messages in a thread. A process that stops, or still loads its model, reads nothing.

    Then its socket is full after some hundred messages, and sending waits. The decode side must
    not wait with it: its other requests go on.
    """

    def __init__(self, connection: Connection, on_error: Callable[[], None]) -> None:
        """on_error: called once, by the thread, if the connection is broken."""
        self.connection, self.on_error = connection, on_error
        self.messages = queue.SimpleQueue[bytes | None]()
        self.thread = threading.Thread(target=self._send, name="outbox", daemon=True)
        self.thread.start()

    def put(self, message: Any) -> None:
        """Send a message as it is now, whatever happens to it later."""
        self.messages.put(pickle.dumps(message))

    def close(self) -> None:
        """End the thread. The process has ended, so no write can wait."""
        self.messages.put(None)
        self.thread.join()

    def _send(self) -> None:
        try:
            while (data := self.messages.get()) is not None:
                self.connection.send_bytes(data)
        except OSError:
            self.on_error()
