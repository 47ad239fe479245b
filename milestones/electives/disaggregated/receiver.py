"""`Receiver`: the decode side of all handshakes. Plain Python data.

It begins attempts, sends the addresses of pages, takes what arrives, and tries again what fails. A
failure is a side that does not answer, or an attempt that the prefill side has stopped.
"""

from __future__ import annotations

import copy
from collections import Counter
from itertools import count

from common import Request
from common.engine_core import EngineCoreOutput

from .decode import DecodeScheduler
from .lease import HEARTBEAT_SECONDS, LEASE_SECONDS
from .transport import Abort, Alive, Bootstrap, End, Heartbeat, Layout, Message, Pages, Transport

MOST_ATTEMPTS = 4  # in a row that bring a request nothing; then it ends with an error


class Receiver:
    """Knows the current attempt of each request. Upholds I5: every attempt ends."""

    def __init__(self, scheduler: DecodeScheduler, transport: Transport, layout: Layout) -> None:
        self.scheduler = scheduler
        self.transport = transport
        self.layout = layout
        self.attempts: dict[Request, int] = {}
        self.requests: dict[int, Request] = {}
        self.failures: Counter[Request] = Counter()
        self.numbers = count(1)
        self.incarnation: int | None = None  # of the prefill side
        self.asked_at: float | None = None  # the first heartbeat that it has not answered
        self.next_heartbeat = 0.0

    def send(self, now: float) -> list[EngineCoreOutput]:
        """Begin attempts, allocate memory, and say that this side lives. Return errors."""
        for request in self.scheduler.prealloc_queue:
            if request not in self.attempts:
                self._bootstrap(request)
        for request in self.scheduler.preallocate():
            attempt, row = self.attempts[request], self.scheduler.kv_cache.pages_of(request)
            start = request.num_computed_tokens // self.scheduler.kv_cache.page_size
            self.transport.windows.open(attempt)
            self.transport.send("prefill", Pages(attempt, start, row[start:]))
        if now >= self.next_heartbeat:
            self.ask(now)
        return self._check_peer(now)

    def ask(self, now: float) -> None:
        """Send a heartbeat. The answer also says whether the prefill side has restarted."""
        self.next_heartbeat = now + HEARTBEAT_SECONDS
        self.asked_at = now if self.asked_at is None else self.asked_at
        self.transport.send("prefill", Heartbeat(frozenset(self.requests)))

    def receive(self) -> list[EngineCoreOutput]:
        """Take the messages that have arrived. Return first tokens and errors."""
        outputs = list[EngineCoreOutput]()
        for message in self.transport.receive("decode"):
            outputs += self._take(message)
        return outputs

    def drop(self, request: Request) -> None:
        """End the attempt of a request, if it has one. The request waits again.

        Its pages may be written until the prefill side has confirmed the end.
        """
        attempt = self.attempts.pop(request, None)
        if attempt is None:
            return
        del self.requests[attempt]
        if request in self.scheduler.transfer_queue:
            self.scheduler.drop(request, attempt)
        self.transport.send("prefill", Abort(attempt))

    def forget(self, request: Request) -> None:
        """End the attempt of a request that ends."""
        self.drop(request)
        del self.failures[request]

    def lose_peer(self) -> list[EngineCoreOutput]:
        """Treat all attempts as failed, because the prefill side is dead. Return errors.

        A dead side writes nothing, so the pages of these attempts are free from now on.
        """
        lost = list(self.requests.values())[::-1]  # each goes to the front of the queue
        outputs = [x for request in lost for x in self._fail(request, "the prefill side died")]
        for attempt in [*self.scheduler.stand_ins]:
            self._release(attempt)
        return outputs

    def _bootstrap(self, request: Request) -> None:
        """Begin an attempt: a copy of the request, which ends with one more token."""
        attempt = self.attempts[request] = next(self.numbers)
        self.requests[attempt] = request
        mine = copy.copy(request)
        mine.token_ids = list(request.token_ids)
        mine.max_num_tokens = request.num_tokens + 1
        mine.logprobs = None if request.logprobs is None else []
        if request.prompt_logprobs is not None:
            mine.prompt_logprobs = list(request.prompt_logprobs)
        mine.num_cached_tokens = mine._token_array = None
        self.transport.send("prefill", Bootstrap(attempt, mine, self.layout))

    def _take(self, message: Message) -> list[EngineCoreOutput]:
        """Process one message. Messages of attempts that have ended change nothing."""
        if isinstance(message, Alive):
            self.asked_at = None
            has_restarted = self.incarnation not in (None, message.incarnation)
            self.incarnation = message.incarnation
            return self.lose_peer() if has_restarted else []
        if not isinstance(message, End):
            return []
        self._release(message.attempt)
        request = self.requests.get(message.attempt)
        if request is None:
            return []
        if message.sampled is None:
            return self._fail(request, message.error)
        self.transport.windows.close(message.attempt)
        del self.requests[message.attempt], self.attempts[request], self.failures[request]
        return [self.scheduler.arrive(request, message)]

    def _fail(self, request: Request, error: str) -> list[EngineCoreOutput]:
        """Let a request be tried again, or end it if it has failed too often."""
        attempt = self.attempts[request]
        self.drop(request)
        self._release(attempt)  # an attempt that was stopped writes no more
        self.failures[request] += 1
        if self.failures[request] < MOST_ATTEMPTS or request not in self.scheduler.prealloc_queue:
            return []
        del self.failures[request]
        self.scheduler.finish_request(request, "error")
        return [EngineCoreOutput(request, finish_reason="error", error=f"no prefill: {error}")]

    def _release(self, attempt: int) -> None:
        """Free the pages of an attempt that was dropped."""
        self.transport.windows.close(attempt)
        self.scheduler.release(attempt)

    def _check_peer(self, now: float) -> list[EngineCoreOutput]:
        """Declare the prefill side dead if it has not answered for the time of a lease."""
        if self.asked_at is None or now - self.asked_at <= LEASE_SECONDS:
            return []
        self.asked_at = None
        return self.lose_peer()

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a request and an attempt do not belong to each other."""
        assert self.attempts == {r: attempt for attempt, r in self.requests.items()}, (
            f"I3: the attempts are {self.attempts}, those by number {self.requests}"
        )
        assert self.attempts.keys() >= {*self.scheduler.transfer_queue}, (
            f"I5: a request waits for pages, and has no attempt: {self.scheduler.transfer_queue}"
        )
