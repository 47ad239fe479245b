"""`Transport`: the messages between both sides, and the pages that one may write for the other.

    decode side    Bootstrap ->  a request to compute; `layout` describes the memory of its pages
                   Pages     ->  memory for the request is allocated: write its pages here
                   Abort     ->  the request is not needed any more
                   Heartbeat ->  the decode side lives, and still needs these attempts
    prefill side   <- Alive      the answer to a heartbeat, with the number of this process
                   <- End        the only end of an attempt: its last page has arrived, or it stops

An attempt is one try to compute a request on the prefill side. A retry has a new number, so that
no late message of an old attempt can be taken for one of the new attempt. Plain Python data. This
transport connects two sides in one process; between processes, the same messages are pickled.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from common import EngineConfig, Request
from common.engine_core import SampledToken

Side = Literal["prefill", "decode"]
Layout = tuple[object, ...]  # what the bytes of a page mean: model, page size, dtype


def layout_of(config: EngineConfig) -> Layout:
    """Return what both sides must agree on, because a page is copied byte by byte."""
    return (config.model, config.page_size, config.dtype, config.quantization)


@dataclass(frozen=True)
class Bootstrap:
    """The first message of an attempt."""

    attempt: int
    request: Request  # the prefill side's own copy
    layout: Layout


@dataclass(frozen=True)
class Pages:
    """The memory for an attempt. The decode side has the pages before page `start` already."""

    attempt: int
    start: int
    pages: list[int]  # for page `start` and all pages after it


@dataclass(frozen=True)
class Abort:
    """The prefill side must stop an attempt, and confirm it by `End`."""

    attempt: int


@dataclass(frozen=True)
class Heartbeat:
    """Renews the leases of these attempts."""

    attempts: frozenset[int]


@dataclass(frozen=True)
class Alive:
    """The answer to a heartbeat. incarnation: differs after the prefill side has restarted."""

    incarnation: int


@dataclass(frozen=True)
class End:
    """An attempt has ended: its pages are not written from now on.

    sampled: the first token, if all pages have arrived; None if the attempt was stopped.
    """

    attempt: int
    sampled: SampledToken | None = None
    num_cached_tokens: int = 0  # of the prompt, on the prefill side
    prompt_logprobs: list[dict[int, float] | None] | None = None
    error: str = ""

    @classmethod
    def of(cls, attempt: int, request: Request, sampled: SampledToken) -> End:
        """Return the end of an attempt with all its pages: the last message about `request`."""
        cached = request.num_cached_tokens or 0
        return cls(attempt, sampled, cached, request.prompt_logprobs)


Message = Bootstrap | Pages | Abort | Heartbeat | Alive | End


class Windows:
    """The attempts with pages that may be written. With RDMA, this is memory registration.

    The side that closes a window can be sure that no write begins after it, and that none runs.
    """

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._lock = threading.Lock()

    def open(self, attempt: int) -> None:
        """Allow the writes of an attempt."""
        with self._lock:
            self._open.add(attempt)

    def close(self, attempt: int) -> None:
        """Refuse all further writes of an attempt. A write that runs has ended when this returns.

        A window may be closed more than once.
        """
        with self._lock:
            self._open.discard(attempt)

    @contextmanager
    def writing(self, attempt: int) -> Iterator[bool]:
        """Return a context for one write: False if the window is closed. It cannot close inside."""
        with self._lock:
            yield attempt in self._open


class Transport:
    """A mailbox for each side. Messages arrive once, and in the order in which they were sent."""

    def __init__(self) -> None:
        self.mailboxes: dict[Side, deque[Message]] = {"prefill": deque(), "decode": deque()}
        self.windows = Windows()

    def send(self, side: Side, message: Message) -> None:
        """Send a message to a side. The sender does not wait."""
        self.mailboxes[side].append(message)

    def receive(self, side: Side) -> list[Message]:
        """Return the messages for a side that have arrived since the last call."""
        mailbox = self.mailboxes[side]
        return [mailbox.popleft() for _ in range(len(mailbox))]

    def lose(self, side: Side) -> None:
        """Drop the messages to a side that has died."""
        self.mailboxes[side].clear()
