"""`PrefillScheduler`: computes prompts, and decides which pages each step sends. Plain Python data.

    bootstrap_queue    the handshake has begun; the decode side has no memory for the request yet
    waiting_queue      it has: the request can be computed (the `waiting` of m5)
    running            chunks of the prompt are computed, and their pages are sent
    inflight_queue     all is computed; pages are still being sent, so the request keeps its row

The queues have SGLang's names. A request here is a copy that belongs to one attempt. It ends with
the token that follows its prompt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from common import EngineConfig, FinishReason, Request

from .schedule_batch import PageSend, ScheduleBatch
from .scheduler import Scheduler
from .transport import Bootstrap, Pages


@dataclass(eq=False)
class Transfer:
    """One attempt on the prefill side."""

    attempt: int
    request: Request
    start: int = 0  # the decode side has the pages before this one
    targets: list[int] | None = None  # its pages for the others; None: not allocated yet
    num_sent: int = 0  # pages, counted from the first one of the row, that steps have sent


class PrefillScheduler(Scheduler):
    """The scheduler of m5 for prompts. Upholds I3: a page that is being sent stays allocated."""

    def __init__(self, config: EngineConfig, num_pages: int) -> None:
        super().__init__(config, num_pages)
        self.transfers: dict[int, Transfer] = {}  # by attempt: all that have not ended
        self.attempts: dict[Request, int] = {}
        self.bootstrap_queue: list[Request] = []
        self.inflight_queue: list[Request] = []

    @property
    def waiting_queue(self) -> deque[Request]:
        return self.waiting

    def bootstrap(self, message: Bootstrap) -> None:
        """Begin an attempt. It waits until the decode side has memory for its pages."""
        self.transfers[message.attempt] = Transfer(message.attempt, message.request)
        self.attempts[message.request] = message.attempt
        self.bootstrap_queue.append(message.request)

    def start(self, message: Pages) -> None:
        """Let an attempt be computed: now it is known where its pages go.

        An attempt that has ended, or that has its pages already, is left alone.
        """
        transfer = self.transfers.get(message.attempt)
        if transfer is not None and transfer.targets is None:
            transfer.start = transfer.num_sent = message.start
            transfer.targets = message.pages
            self.bootstrap_queue.remove(transfer.request)
            self.add_request(transfer.request)

    def schedule(self) -> ScheduleBatch:
        """Plan a step of m5, and the pages that it sends."""
        batch = super().schedule()
        for request, num_tokens in batch.tokens_per_request():
            if send := self.pages_to_send(request, num_tokens):
                self.transfers[send.attempt].num_sent += len(send.sources)
                batch.sends.append(send)
        return batch

    def pages_to_send(self, request: Request, num_tokens: int) -> PageSend | None:
        """Return the pages that are complete after a step of `num_tokens` tokens; None: no pages.

        A page goes once. The last page goes with the last token, even if it is not full. Pages that
        the prefill side has cached go with the first step, and those before `start` never.
        """
        transfer = self.transfers[self.attempts[request]]
        assert transfer.targets is not None, f"{request} is computed without memory for its pages"
        end = request.num_computed_tokens + num_tokens
        page_size = self.kv_cache.page_size
        is_last = end == request.num_tokens
        num_pages = self.kv_cache.pages_for(end) if is_last else end // page_size
        first = transfer.num_sent
        if num_pages <= first:
            return None
        sources = self.kv_cache.pages_of(request)[first:num_pages]
        targets = transfer.targets[first - transfer.start : num_pages - transfer.start]
        return PageSend(transfer.attempt, first, sources, targets)

    def undo(self, batch: ScheduleBatch) -> None:
        """Undo `schedule`. The pages that the batch would have sent are sent later."""
        for send in batch.sends:
            if send.attempt in self.transfers:
                self.transfers[send.attempt].num_sent = send.first
        super().undo(batch)

    def finish_request(self, request: Request, reason: FinishReason) -> None:
        """End a request. If it is computed, it keeps its row while its pages are being sent."""
        if reason == "abort":
            super().finish_request(request, reason)
            return
        self.running.remove(request)
        self.inflight_queue.append(request)

    def end(self, attempt: int) -> None:
        """End an attempt in any queue, and free what it holds."""
        transfer = self.transfers.pop(attempt, None)
        if transfer is None:
            return
        request = transfer.request
        del self.attempts[request]
        if request in self.bootstrap_queue:
            self.bootstrap_queue.remove(request)
        elif request in self.inflight_queue:
            self.inflight_queue.remove(request)
            self.kv_cache.free(request)
        else:
            self.finish_request(request, "abort")

    def check_invariants(self) -> None:
        queued = [*self.bootstrap_queue, *self.waiting, *self.running, *self.inflight_queue]
        assert len(queued) == len(set(queued)) and set(queued) == self.attempts.keys(), (
            f"I3: attempts of {[*self.attempts]}, and queued are {queued}"
        )
        assert {t.request: t.attempt for t in self.transfers.values()} == self.attempts, (
            "I3: a request of the prefill side has two attempts"
        )
        self.in_flight.check_invariants([*self.running, *self.inflight_queue])
