"""`RankGroup`: starts the other ranks, sends them each call of the model, and ends them."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from ..config import EngineConfig
from ..fast import subclass
from ..hf.shared import lock_of
from .calls import Sender
from .division import Division
from .messages import Failed, Loaded, Ready, Start
from .ranks import RankError, Ranks, open_ranks

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
LOADING_SECONDS = 1800.0  # the longest time that a rank may need to read its model
ENDING_SECONDS = 5.0  # after that, a rank that does not end is killed
REASON_SECONDS = 1.0  # how long a failed call waits for the message of the rank that caused it


class Process(Protocol):
    """A started rank: what `subprocess.Popen` has."""

    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def start_process(theirs: socket.socket, num_threads: int) -> Process:
    """Start a rank as a process of its own. It gets one end of a pair of sockets.

    It is in a session of its own, so that Ctrl-C in the terminal reaches rank 0 only.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "common.parallel.worker", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(num_threads)},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


@dataclass
class Workers:
    """The started ranks. A thread watches them: it holds this object, and not the `RankGroup`."""

    processes: list[Process] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)  # of rank 1, rank 2, ...
    failure: str | None = None  # why the group has ended
    has_ended: threading.Event = field(default_factory=threading.Event)
    on_failure: Callable[[], None] = lambda: None
    _wake: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)
    _watcher: threading.Thread | None = None
    _num_threads: int = field(default_factory=torch.get_num_threads)  # of torch, before the start
    _folder: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="ladder-ranks-"))

    @property
    def rendezvous(self) -> str:
        """Return the path of the file in which the ranks find each other."""
        return str(Path(self._folder, "rendezvous"))

    def start(self, launch: Callable[[socket.socket, int], Process], message: Start) -> None:
        """Start one rank."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.processes.append(launch(theirs, message.num_threads))
        self.connections.append(Connection(ours.detach()))
        self.connections[-1].send(message)

    def receive(self, kind: type[Any]) -> list[Any]:
        """Return the next message of each rank. Raises `RankError` for another message or none."""
        messages = []
        for rank, connection in enumerate(self.connections, 1):
            message = _next_message(connection, LOADING_SECONDS)
            if not isinstance(message, kind):
                raise RankError(_reason(rank, message))
            messages.append(message)
        return messages

    def watch(self) -> None:
        """Start to watch the ranks. From here on, they send a message only if they fail."""
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        ready = wait([*self.connections, self._wake[1]])
        for rank, connection in enumerate(self.connections, 1):
            if connection in ready and self.failure is None:
                self.failure = _reason(rank, _next_message(connection, 0.0))
                self.has_ended.set()
                for process in self.processes:  # they wait for each other in the middle of a call
                    process.kill()
                self.on_failure()

    def close(self) -> None:
        """End all ranks, and wait for them. May be called more than once, and from any thread."""
        self.failure = self.failure or "the ranks were closed"
        self.has_ended.set()
        self._wake[0].close()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)
                continue
            process.kill()
            process.wait()
        torch.set_num_threads(self._num_threads)
        shutil.rmtree(self._folder, ignore_errors=True)


class RankGroup:
    """The ranks of one model, seen from rank 0. The engine is in this process."""

    def __init__(self, config: EngineConfig) -> None:
        self.config, self.size = config, config.tensor_parallel_size
        self.workers = Workers()
        self.close = weakref.finalize(self, self.workers.close)
        self.sender = Sender()
        self.weight_bytes: list[int] = []  # of each rank

    def open(self, division: Division, device: torch.device) -> Ranks:
        """Start the other ranks, and return the process group after they have loaded the model."""
        rendezvous = self.workers.rendezvous
        num_threads = max(1, torch.get_num_threads() // self.size)
        for rank in range(1, self.size):
            config = self.config
            if device.type == "cuda":
                config = replace(config, device=f"cuda:{rank}")
            message = Start(config, rank, rendezvous, sys.path, num_threads)
            self.workers.start(start_process, message)
        self.workers.receive(Loaded)
        torch.set_num_threads(num_threads)  # the ranks share the cores
        self.ranks = open_ranks(device, 0, self.size, rendezvous)
        return self.ranks

    def take(self, model: PreTrainedModel, changed: dict[str, int], weight_bytes: int) -> None:
        """Send each later call of the model to all ranks.

        changed: how many modules each pass changed. Raises `RankError` if it changed others on
        another rank, because the ranks would then wait for each other at different places.
        """
        ready: list[Ready] = self.workers.receive(Ready)
        for rank, message in enumerate(ready, 1):
            if message.changed != changed:
                raise RankError(
                    f"the passes changed {changed} on rank 0, and {message.changed} on rank {rank}"
                )
        self.weight_bytes = [weight_bytes, *(message.weight_bytes for message in ready)]
        self.ranks.is_shared = False
        if model.device.type == "cuda":  # NCCL does not notice that a process has ended
            self.workers.on_failure = self.ranks.group.abort
        self.workers.watch()
        original: Any = type(model)
        model.__dict__["rank_group"] = self
        model.__class__ = subclass(_CalledOnAllRanks, original)

    def call(
        self,
        forward: Callable[..., Any],
        attention: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the model on all ranks. Return the result of rank 0.

        After an exception, the other ranks wait in the middle of the call. Therefore they are
        ended, and `RankError` is raised for this call and all later ones.
        """
        self._require_alive()
        call, content = self.sender.pack(attention, args, kwargs)
        try:
            for connection in self.workers.connections:
                connection.send(call)
            self.ranks.is_shared = True
            self.ranks.broadcast(content)
            return forward(*args, **kwargs)
        except BaseException as error:
            self.workers.has_ended.wait(REASON_SECONDS)
            reason = self.workers.failure or f"the forward failed on rank 0: {error}"
            self.ranks.leave()
            self.close()
            raise RankError(reason) from error
        finally:
            self.ranks.is_shared = False

    def _require_alive(self) -> None:
        if self.workers.failure is not None:
            raise RankError(self.workers.failure)


class _CalledOnAllRanks(torch.nn.Module):
    """A mixin for a model: each call is made on all ranks."""

    rank_group: RankGroup
    config: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with lock_of(self):
            forward, attention = super().__call__, self.config._attn_implementation
            return self.rank_group.call(forward, attention, args, kwargs)


def _next_message(connection: Connection, seconds: float) -> Any:
    """Return the next message of a rank; None if it has ended or does not answer in time."""
    with contextlib.suppress(EOFError, OSError):
        return connection.recv() if connection.poll(seconds) else None
    return None


def _reason(rank: int, message: Any) -> str:
    if isinstance(message, Failed):
        # A server tells its clients the reason. The traceback is not for them.
        logger.error("rank %d failed:\n%s", rank, message.traceback)
        return f"rank {rank} failed: {message.cause}"
    return f"rank {rank} has ended, or does not answer"
