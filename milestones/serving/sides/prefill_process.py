"""`python -m milestones.serving.sides.prefill_process FD`: the prefill side as a process.

It ends when its decode side closes the socket, or ends: the system then closes it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import torch

from common.engine_core import ForwardError
from common.hf.model_loading import load_model
from common.llm_engine import BLAMELESS

from ...electives.disaggregated.engine import PrefillCore
from ...electives.disaggregated.model_runner import PrefillRunner
from ...electives.disaggregated.schedule_batch import PageSend
from ...electives.disaggregated.transport import (
    Alive,
    End,
    Heartbeat,
    Message,
    Pages,
    Side,
    Transport,
)
from .messages import (
    Check,
    Checked,
    ForwardFailed,
    Posted,
    Ready,
    Report,
    Reset,
    Start,
    StartFailed,
)
from .meter import TransferMeter
from .pages import PageSender, SharedMemory

IDLE_SECONDS = 1.0  # between two looks at the leases


class ChildTransport(Transport):
    """The socket to the decode side. A thread reads it, also while the model is loaded.

    So this process ends with its decode side, whatever it waits for.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection
        self.sender: PageSender | None = None
        self._sending = threading.Lock()
        self._arrived = threading.Event()
        threading.Thread(target=self._read, name="messages", daemon=True).start()

    def send(self, side: Side, message: Message) -> None:
        assert side == "decode", "this is the prefill side"
        if isinstance(message, End):
            self.windows.close(message.attempt)
        self.post(message)

    def post(self, message: Any) -> None:
        """Send a message. It is read after all pages that this side has written."""
        with self._sending:
            self.connection.send(Posted(message, self.sender.num_writes if self.sender else 0))

    def wait(self) -> None:
        """Wait for a message, but not for long."""
        self._arrived.wait(IDLE_SECONDS)
        self._arrived.clear()

    def _read(self) -> None:
        """Queue messages. A heartbeat asks whether this process lives: a forward may be long."""
        try:
            while True:
                message = self.connection.recv()
                if isinstance(message, Heartbeat):
                    self.post(Alive(0))
                self.mailboxes["prefill"].append(message)
                self._arrived.set()
        except (EOFError, OSError):  # the decode side has ended
            os._exit(0)


class SendingRunner(PrefillRunner):
    """Sends pages through a process group, and not into shared memory."""

    sender: PageSender

    def write(self, layer: int, send: PageSend, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Send pages. A connection that has failed is not mended: a new process takes over."""
        try:
            self.sender.write(layer, send.attempt, send.targets, keys, values)
        except RuntimeError:
            os._exit(1)


class ProcessCore(PrefillCore):
    """The prefill side, with the messages that only processes need."""

    transport: ChildTransport

    def take(self, message: Any) -> None:
        if isinstance(message, Pages) and message.attempt in self.scheduler.transfers:
            self.transport.windows.open(message.attempt)
        elif isinstance(message, Reset):
            self.reset_prefix_cache()
        elif isinstance(message, Check):
            self.transport.post(Checked(self.broken_invariant()))
        super().take(message)

    def broken_invariant(self) -> str:
        """Return what is broken; nothing if all is right."""
        try:
            self.check_invariants()
        except AssertionError as error:
            return str(error)
        return ""

    def step_or_report(self) -> None:
        """Compute a step. If its forward fails, wait until the decode side drops the attempts.

        The decode side finds the request that is the cause, so that the others can go on.
        """
        try:
            self.step()
        except ForwardError as failure:
            known = self.scheduler.attempts
            attempts = tuple(known[request] for request in failure.requests if request in known)
            is_blameless = isinstance(failure.error, BLAMELESS)
            self.transport.post(ForwardFailed(attempts, str(failure), is_blameless))
            while not self.scheduler.transfers.keys().isdisjoint(attempts):
                self.transport.wait()
                self.receive()
            self.finish_sends()


def open_core(transport: ChildTransport, start: Start) -> ProcessCore:
    """Load the model, and return the core of this process."""
    loaded = load_model(start.config)
    runner: PrefillRunner
    if isinstance(start.pages, SharedMemory):
        runner = PrefillRunner(loaded.model, start.config, _pool_of(start.pages))
    else:
        runner = SendingRunner(loaded.model, start.config, _pool_of(None))
    return ProcessCore(start.config, runner, transport)


def meet(core: ProcessCore, start: Start) -> None:
    """Say that this process is ready. If pages are sent, join the process group."""
    transport, runner = core.transport, core.runner
    transport.post(Ready())
    if isinstance(runner, SendingRunner):
        runner.sender = transport.sender = PageSender(start.pages, runner.model.device)


def run(core: ProcessCore) -> None:
    """Compute prompts until this process is ended."""
    transport, meter = core.transport, TransferMeter(core.runner)
    while True:
        if core.has_work:
            core.step_or_report()
            transport.post(Report(core.stats(), meter.read(is_idle=not core.has_work)))
        else:
            transport.wait()
            core.receive()


class _Pool:
    """The pool of the decode side, seen from here."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def _pool_of(memory: SharedMemory | None) -> Any:
    pool = _Pool()
    pool.keys, pool.values = [], []
    if memory is not None:
        memory.open_into(pool)
    return pool


def main() -> None:
    """Be a prefill process. The first argument is the file descriptor of its socket."""
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, ConnectionError):  # the decode side has ended
        start: Start = connection.recv()
        sys.path[:] = start.sys_path
        torch.set_num_threads(start.num_threads)
        transport = ChildTransport(connection)
        try:
            core = open_core(transport, start)
        except Exception as error:
            transport.post(StartFailed(f"{type(error).__name__}: {error}"))
            raise
        meet(core, start)
        run(core)
    os._exit(0)  # an orderly end of torch's threads would take a second


if __name__ == "__main__":
    main()
