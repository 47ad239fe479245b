"""`Peer`: one prefill process, seen from the decode side that has started it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import EngineConfig

from ...electives.disaggregated.kv_pool import KVPool
from ...electives.disaggregated.lease import LEASE_SECONDS
from ...electives.disaggregated.transport import Alive, Heartbeat, Windows
from .messages import Posted, Ready, Report, Start, Transfer
from .outbox import Outbox
from .pages import EVERY_WRITE, PageReceiver, Rendezvous, SharedMemory, new_rendezvous

ROOT = Path(__file__).resolve().parents[3]
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
    wake: Callable[[], None]  # called by another thread when pages have arrived


@dataclass
class Running:
    """A process, from its start to its end."""

    process: subprocess.Popen[bytes]
    connection: Connection
    outbox: Outbox
    receiver: PageReceiver | None
    rendezvous: Rendezvous | None
    is_ready: bool = False
    asked_at: float | None = None  # the first heartbeat that it has not answered
    posted: list[Posted] = field(default_factory=list)  # read, but their pages are not all here
    report: Report = field(default_factory=Report)


class Peer:
    """Keeps one prefill process running. An attempt belongs to one process, and ends with it."""

    def __init__(self, number: int, setup: Setup) -> None:
        self.number = number
        self.setup = setup
        self.now = time.monotonic
        self.attempts: set[int] = set()
        self.num_deaths = 0
        self.pause = FIRST_PAUSE
        self.start_at = 0.0  # the time before which no process is started
        self.sent = Transfer()  # by processes that have ended
        self.running: Running | None = self._start()

    @property
    def pid(self) -> int | None:
        return None if self.running is None else self.running.process.pid

    @property
    def is_ready(self) -> bool:
        return self.running is not None and self.running.is_ready

    @property
    def report(self) -> Report:
        """The newest report. Its transfers are those of all processes that have had this place."""
        report = Report() if self.running is None else self.running.report
        return Report(report.stats, self.sent + report.transfer)

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
        is_alive = self._read(running)
        num_writes = EVERY_WRITE if running.receiver is None else running.receiver.num_writes
        while running.posted and running.posted[0].num_writes <= num_writes:
            message = running.posted.pop(0).message
            if isinstance(message, Ready):
                running.is_ready, self.pause = True, FIRST_PAUSE
            elif isinstance(message, Alive):
                running.asked_at = None
            elif isinstance(message, Report):
                running.report = message
            else:
                yield message
        if not is_alive or self._is_stuck(running):
            self.end(running)
            yield None

    def _read(self, running: Running) -> bool:
        """Read what has arrived. Return whether the process lives."""
        try:
            while running.connection.poll():
                running.posted.append(running.connection.recv())
        except (EOFError, OSError):
            return False
        return True

    def _is_stuck(self, running: Running) -> bool:
        """Return whether the process has not answered a heartbeat for the time of a lease."""
        asked = running.asked_at
        return asked is not None and self.now() - asked > LEASE_SECONDS

    def end(self, running: Running) -> None:
        """End the process for certain, so that it writes no page from here on."""
        running.process.kill()
        running.process.wait()
        running.outbox.close()
        running.connection.close()
        if running.rendezvous is not None:
            shutil.rmtree(Path(running.rendezvous.path).parent, ignore_errors=True)
        self.sent += running.report.transfer
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
                [sys.executable, "-m", "milestones.serving.sides.prefill_process",
                 str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *fds],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(setup.num_threads)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        connection = Connection(ours.detach())
        outbox = Outbox(connection, on_error=process.kill)
        outbox.put(Start(setup.config, pages, sys.path, setup.num_threads))
        receiver = rendezvous = None
        if isinstance(pages, Rendezvous):
            rendezvous = pages
            receiver = PageReceiver(pages, setup.pool, setup.windows, setup.wake)
        return Running(process, connection, outbox, receiver, rendezvous)
