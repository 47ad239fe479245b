"""`ProcessTransport`: several prefill processes as the one prefill side that a receiver knows.

An attempt goes to the process with the fewest attempts. If this process ends, in whatever way, its
attempts end with an error, and the receiver tries them again. A process that has stopped to answer
is killed first. So the memory of an attempt that has ended is never written again.
"""

from __future__ import annotations

import socket
import time
from multiprocessing.connection import wait
from typing import Any

from ...electives.disaggregated.transport import (
    Abort,
    Alive,
    Bootstrap,
    End,
    Heartbeat,
    Message,
    Pages,
    Side,
    Transport,
)
from .messages import Check, Checked, ForwardFailed, Reset
from .peer import Peer


class ProcessTransport(Transport):
    """The decode side's end of all sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.peers: list[Peer] = []
        self.peer_of: dict[int, Peer] = {}  # by attempt
        self.failures: list[ForwardFailed] = []
        self.checked: list[Checked] = []
        self._wake, self._awake = socket.socketpair()
        for end in (self._wake, self._awake):
            end.setblocking(False)

    def send(self, side: Side, message: Message) -> None:
        assert side == "prefill", "this is the decode side"
        if isinstance(message, Heartbeat):
            for peer in self.peers:
                peer.send(Heartbeat(frozenset(peer.attempts)))
            self.mailboxes["decode"].append(Alive(0))  # a process that ends is noticed here
        elif isinstance(message, Bootstrap):
            self._begin(message)
        elif isinstance(message, (Pages, Abort)) and message.attempt in self.peer_of:
            self.peer_of[message.attempt].send(message)

    def receive(self, side: Side) -> list[Message]:
        for peer in self.peers:
            for message in peer.poll():
                self._take(peer, message)
        return super().receive(side)

    def wait(self, seconds: float) -> None:
        """Wait for a message, for pages, or for the end of a process."""
        running = [peer.running for peer in self.peers if peer.running is not None]
        ready = wait([self._awake, *(one.connection for one in running)], seconds)
        if self._awake in ready:
            self._awake.recv(4096)

    def wake(self) -> None:
        """End `wait`. Any thread may call it."""
        try:
            self._wake.send(b"x")
        except BlockingIOError:
            return  # it is awake anyway

    def reset_prefix_cache(self) -> None:
        for peer in self.peers:
            peer.send(Reset())

    def check_invariants(self, seconds: float = 60.0) -> None:
        """Raise `AssertionError` if a process that runs has a broken invariant."""
        ready = [peer for peer in self.peers if peer.is_ready]
        before = sum(peer.num_deaths for peer in self.peers)
        self.checked.clear()
        for peer in ready:
            peer.send(Check())
        end = time.monotonic() + seconds
        while len(self.checked) + sum(peer.num_deaths for peer in self.peers) - before < len(ready):
            assert time.monotonic() < end, "I5: a prefill process does not answer"
            self.wait(0.1)
            self.mailboxes["decode"].extend(self.receive("decode"))
        for checked in self.checked:
            assert not checked.error, checked.error

    def close(self) -> None:
        """End all processes."""
        for peer in self.peers:
            peer.close()

    def _begin(self, message: Bootstrap) -> None:
        """Give an attempt to a process, if one runs. One that still loads its model may wait."""
        running = [peer for peer in self.peers if peer.running is not None]
        if not running:
            error = "no prefill process runs"
            self.mailboxes["decode"].append(End(message.attempt, error=error))
            return
        peer = min(running, key=lambda peer: (not peer.is_ready, len(peer.attempts)))
        self.peer_of[message.attempt] = peer
        peer.attempts.add(message.attempt)
        peer.send(message)

    def _take(self, peer: Peer, message: Any) -> None:
        """Process a message of a process. None: it has ended."""
        if isinstance(message, End):
            self._forget(message.attempt)
            self.mailboxes["decode"].append(message)
        elif isinstance(message, ForwardFailed):
            self.failures.append(message)
        elif isinstance(message, Checked):
            self.checked.append(message)
        elif message is None:
            for attempt in sorted(peer.attempts):
                self._forget(attempt)
                error = "the prefill process has ended"
                self.mailboxes["decode"].append(End(attempt, error=error))

    def _forget(self, attempt: int) -> None:
        peer = self.peer_of.pop(attempt, None)
        if peer is not None:
            peer.attempts.discard(attempt)
