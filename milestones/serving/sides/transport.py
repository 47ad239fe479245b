"""`ProcessTransport`: several prefill processes as the one prefill side that a receiver knows.

An attempt goes to the process with the fewest attempts. If this process ends, in whatever way, its
attempts end with an error, and the receiver tries them again. A process that has stopped to answer
is killed first. So the memory of an attempt that has ended is never written again. While no process
runs, attempts wait for the next one.
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
        self.waiting: dict[int, list[Message]] = {}  # for a process; their messages, by attempt
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
            self.waiting[message.attempt] = [message]
            self._give_out()
        elif isinstance(message, (Pages, Abort)):
            if owner := self.peer_of.get(message.attempt):
                owner.send(message)
            elif message.attempt in self.waiting:
                self._keep(message)

    def poll(self) -> None:
        """Read what has arrived. Notice processes that have ended, and start new ones."""
        for peer in self.peers:
            for message in peer.poll():
                self._take(peer, message)
        self._give_out()

    def receive(self, side: Side) -> list[Message]:
        self.poll()
        return super().receive(side)

    def wait(self, seconds: float) -> None:
        """Wait for a message, for pages, or for the end of a process."""
        if wait([self._awake], seconds):
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

    def _give_out(self) -> None:
        """Give attempts to processes, if any runs. One that still loads its model may wait."""
        running = [peer for peer in self.peers if peer.running is not None]
        while running and self.waiting:
            attempt = next(iter(self.waiting))
            peer = min(running, key=lambda peer: (not peer.is_ready, len(peer.attempts)))
            self.peer_of[attempt] = peer
            peer.attempts.add(attempt)
            for message in self.waiting.pop(attempt):
                peer.send(message)

    def _keep(self, message: Pages | Abort) -> None:
        """Keep a message with its attempt, which waits for a process. An abort ends it at once."""
        if isinstance(message, Pages):
            self.waiting[message.attempt].append(message)
        else:
            del self.waiting[message.attempt]
            self.mailboxes["decode"].append(End(message.attempt, error="it was aborted"))

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
            for attempt in sorted(peer.attempts, reverse=True):  # each goes to the front
                self._forget(attempt)
                self.mailboxes["decode"].append(End(attempt, error=peer.last_error))

    def _forget(self, attempt: int) -> None:
        peer = self.peer_of.pop(attempt, None)
        if peer is not None:
            peer.attempts.discard(attempt)
