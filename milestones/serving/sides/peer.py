"""`Peer`: one prefill process, seen from the decode side that has started it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import EngineConfig

from ...electives.disaggregated.kv_pool import KVPool
from ...electives.disaggregated.lease import LEASE_SECONDS
from ...electives.disaggregated.transport import Alive, Heartbeat, Windows
from .inbox import Inbox
from .messages import Posted, Ready, Report, Start, StartFailed
from .outbox import Outbox
from .pages import EVERY_WRITE, PageReceiver, Rendezvous, SharedMemory, new_rendezvous

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ["-m", "milestones.serving.sides.prefill_process"]
START_SECONDS = 600.0  # the longest time in which a process must load its model
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a process that cannot start starts again


@dataclass
class Setup:
    """What all prefill processes of a decode side have in common.

    memory: None if pages are sent, and then written by a thread here.
    """

    config: EngineConfig
    pool: KVPool
    windows: Windows
    memory: SharedMemory | None
    num_threads: int
    wake: Callable[[], None]  # called by other threads when messages or pages have arrived


@dataclass
class Running:
    """A process, from its start to its end."""

    process: subprocess.Popen[bytes]
    inbox: Inbox
    outbox: Outbox
    rendezvous: Rendezvous | None
    started_at: float
    receiver: PageReceiver | None = None  # of sent pages, when the process is ready
    is_ready: bool = False
    asked_at: float | None = None  # the first heartbeat that it has not answered
    posted: deque[Posted] = field(default_factory=deque)  # read, but their pages are not all here
    error: str = ""  # why it cannot start


class Peer:
    """Keeps one prefill process running. An attempt belongs to one process, and ends with it."""

    def __init__(self, number: int, setup: Setup) -> None:
        self.number = number
        self.setup = setup
        self.now = time.monotonic
        self.attempts: set[int] = set()
        self.num_deaths = 0
        self.last_error = ""  # why the last process has ended
        self.pause = FIRST_PAUSE
        self.start_at = 0.0  # the time before which no process is started
        self.report = Report()  # the newest; it counts what all processes of this place have done
        self.earlier = Report()  # the last one of the processes that have ended
        self.running: Running | None = self._start()

    @property
    def pid(self) -> int | None:
        return None if self.running is None else self.running.process.pid

    @property
    def is_ready(self) -> bool:
        return self.running is not None and self.running.is_ready

    def send(self, message: Any) -> None:
        """Send a message. If the process has ended, it is lost, and `poll` will notice it."""
        running = self.running
        if running is None:
            return
        if isinstance(message, Heartbeat) and running.is_ready and running.asked_at is None:
            running.asked_at = self.now()
        running.outbox.put(message)

    def poll(self) -> Iterator[Any]:
        """Yield the messages that have arrived. If the process has ended, the last one is None."""
        running = self.running
        if running is None:
            if self.now() >= self.start_at:
                self.running = self._start()
            return
        messages, is_closed = running.inbox.take()
        running.posted += messages
        num_writes = EVERY_WRITE if running.receiver is None else running.receiver.num_writes
        while running.posted and running.posted[0].num_writes <= num_writes:
            message = running.posted.popleft().message
            if isinstance(message, Ready):
                self._welcome(running)
            elif isinstance(message, StartFailed):
                running.error = f"could not start: {message.error}"
            elif isinstance(message, Alive):
                running.asked_at = None
            elif isinstance(message, Report):
                self.report = message.after(self.earlier)
            else:
                yield message
        stuck = self._why_stuck(running)
        if is_closed or stuck:
            self.end(running, "" if is_closed else stuck)
            yield None

    def _welcome(self, running: Running) -> None:
        """Note that a process has its model, and receive its pages from now on.

        The thread that receives pages waits for the process. A process that cannot load its model
        never comes, so the thread does not begin before.
        """
        running.is_ready, self.pause = True, FIRST_PAUSE
        if running.rendezvous is not None:
            setup = self.setup
            running.receiver = PageReceiver(
                running.rendezvous, setup.pool, setup.windows, setup.wake
            )

    def _why_stuck(self, running: Running) -> str:
        """Return what a process that seems to live has not done in time; nothing if all is well."""
        if not running.is_ready and self.now() - running.started_at > START_SECONDS:
            return f"was not ready after {START_SECONDS:g} s"
        if running.asked_at is not None and self.now() - running.asked_at > LEASE_SECONDS:
            return f"did not answer for {LEASE_SECONDS:g} s"
        return ""

    def end(self, running: Running, reason: str = "") -> None:
        """End the process for certain, so that it writes no page from here on."""
        running.process.kill()
        status = running.process.wait()
        running.outbox.close()
        running.inbox.close()
        if running.rendezvous is not None:
            shutil.rmtree(Path(running.rendezvous.path).parent, ignore_errors=True)
        why = reason or running.error or f"ended with status {status}"
        self.last_error = f"prefill process {self.number} {why}"
        self.earlier = self.report
        self.num_deaths += 1
        if not running.is_ready:  # it may never start: do not try all the time
            self.start_at = self.now() + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
        self.running = None

    def close(self) -> None:
        """End the process."""
        if self.running is not None:
            self.end(self.running)
        self.start_at = float("inf")

    def _start(self) -> Running:
        """Start a process. It gets one end of a pair of sockets, and the memory of the pool.

        It is in a session of its own, so that Ctrl-C in the terminal reaches the decode side only.
        """
        setup = self.setup
        pages = setup.memory or new_rendezvous()
        fds = [setup.memory.fd] if setup.memory is not None else []
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            process = subprocess.Popen(
                [sys.executable, *PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *fds],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(setup.num_threads)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        connection = Connection(ours.detach())
        inbox, outbox = Inbox(connection, setup.wake), Outbox(connection, on_error=process.kill)
        outbox.put(Start(setup.config, pages, sys.path, setup.num_threads))
        rendezvous = pages if isinstance(pages, Rendezvous) else None
        return Running(process, inbox, outbox, rendezvous, self.now())
