"""`DecodeScheduler`: computes one token of each request in every step, and never a prompt.

    prealloc_queue    the request waits for memory (the `waiting` of m5)
    transfer_queue    its row and its pages are allocated; the prefill side writes them
    waiting_queue     the pages have arrived: the request joins the next step
    running           it decodes

The queues have SGLang's names. Plain Python data. Memory is allocated before a transfer begins, so
a transfer never waits in the middle, and the prefill side never keeps pages for a request that has
no place here. Upholds I3: pages that may still be written belong to a stand-in of their request
until the prefill side has confirmed that it writes them no more, or is declared dead.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from dataclasses import replace

from common import EngineConfig, EngineStats, FinishReason, Request
from common.engine_core import EngineCoreOutput, append_token

from .add_req_result import AddReqResult
from .in_flight import continuing
from .schedule_batch import ScheduleBatch
from .scheduler import Scheduler
from .transport import End


class DecodeScheduler(Scheduler):
    """The scheduler of m5, for requests with keys and values that come from another engine."""

    def __init__(self, config: EngineConfig, num_pages: int) -> None:
        super().__init__(config, num_pages)
        self.transfer_queue: list[Request] = []
        self.waiting_queue: list[Request] = []
        self.stand_ins: dict[int, Request] = {}  # by attempt

    @property
    def prealloc_queue(self) -> deque[Request]:
        return self.waiting

    @property
    def with_rows(self) -> list[Request]:
        """The live requests that hold memory."""
        return [*self.running, *self.waiting_queue, *self.transfer_queue]

    def preallocate(self) -> list[Request]:
        """Give memory to waiting requests, as the policy orders them. Return these requests.

        The row of a request begins with the prefix that is cached here, which is not sent. Memory
        for running requests to grow is left free, as m5 does it.
        """
        admitted = list[Request]()
        if not self.waiting:
            return admitted
        for request in self.policy.order(self.waiting):
            result = self.admission.check(request, ScheduleBatch(), self.with_rows)
            if result is AddReqResult.PREFIX_IN_FLIGHT:
                continue  # its prefix is on its way already, and is not sent twice
            if result is not AddReqResult.CONTINUE or not self._has_pages_for(request):
                break
            self.waiting.remove(request)
            self.policy.on_admission(request)
            self.kv_cache.allocate(request)
            self.kv_cache.allocate_slots(request, request.num_tokens)
            self.transfer_queue.append(request)
            admitted.append(request)
        return admitted

    def _has_pages_for(self, request: Request) -> bool:
        """Return whether all pages of a request can be allocated now."""
        missing = self.kv_cache.pages_for(request.num_tokens)
        missing -= self.kv_cache.find_prefix(request).num_locked
        return self.kv_cache.has_free_row and missing <= self.kv_cache.num_free_pages

    def arrive(self, request: Request, end: End) -> EngineCoreOutput:
        """Take the pages and the first token of a request from the prefill side.

        The token may end the request: then no step is needed here.
        """
        assert end.sampled is not None, "only an attempt that was not stopped brings pages"
        self.transfer_queue.remove(request)
        self.waiting_queue.append(request)
        request.num_computed_tokens = request.num_tokens
        self.kv_cache.insert(request)  # from here on, other requests can match these pages
        if request.num_cached_tokens is None:
            request.num_cached_tokens = end.num_cached_tokens
        if request.prompt_logprobs is not None and end.prompt_logprobs is not None:
            request.prompt_logprobs = end.prompt_logprobs
        output = append_token(request, end.sampled)
        if output.finish_reason is not None:
            self.finish_request(request, output.finish_reason)
        return output

    def drop(self, request: Request, attempt: int) -> None:
        """Let a request wait again without its transfer. A stand-in keeps the row and the pages."""
        self.transfer_queue.remove(request)
        stand_in = self.stand_ins[attempt] = copy.copy(request)
        stand_in.token_ids = list(request.token_ids)
        request.row, request.num_computed_tokens = None, 0
        self.policy.on_retraction(request)
        self.waiting.appendleft(request)

    def release(self, attempt: int) -> None:
        """Free the pages of an attempt that was dropped: they are not written any more."""
        stand_in = self.stand_ins.pop(attempt, None)
        if stand_in is not None:
            self.kv_cache.free(stand_in)

    def join_running(self) -> None:
        """Let the requests that have all their pages run."""
        self.running += self.waiting_queue
        self.waiting_queue.clear()

    def schedule(self) -> ScheduleBatch:
        """Compute one token of each request that has all its pages."""
        self.join_running()
        return super().schedule()

    def _admit_waiting(self, batch: ScheduleBatch) -> None:
        """Let no request join, as prompts are computed elsewhere. Note why the oldest one waits."""
        if self.waiting:
            oldest, nothing = self.waiting[0], ScheduleBatch()
            batch.add_result = self.admission.check(oldest, nothing, self.with_rows)

    def needs_result(self) -> bool:
        """Return whether a request that ends with the step in flight may avoid a retraction."""
        going_on = continuing([*self.running, *self.waiting_queue])
        return self.kv_cache.num_new_pages(going_on) > self.kv_cache.num_free_pages

    def finish_request(self, request: Request, reason: FinishReason) -> None:
        if request in self.waiting_queue:
            self.waiting_queue.remove(request)
            self.running.append(request)
        super().finish_request(request, reason)

    def make_stats(self) -> EngineStats:
        """Return the counters and the state. A request with a row counts as running."""
        written = [*self.running, *self.waiting_queue, *self.in_flight.finished]
        used = self.kv_cache.num_used_tokens(written)
        running = len(self.with_rows)
        return replace(super().make_stats(), num_running=running, kv_tokens_used=used)

    def check_invariants(self) -> None:
        assert len(self.with_rows) <= self.max_num_running, (
            f"I5: {len(self.with_rows)} requests hold rows, more than {self.max_num_running}"
        )
        for request in self.waiting:
            assert request.num_computed_tokens == 0 and request.row is None, (
                f"I3: {request} waits, but it holds KV"
            )
        written = Counter[Request]()
        for batch in self.in_flight.batches:
            assert not batch.is_advanced, "I1: a placeholder is left behind"
            written.update(dict(batch.tokens_per_request()))
        receiving = [*self.transfer_queue, *self.stand_ins.values()]
        for request in receiving:  # memory is allocated for all their tokens
            written[request] += request.num_tokens - request.num_computed_tokens
        holders = [*self.running, *self.waiting_queue, *receiving, *self.in_flight.finished]
        self.kv_cache.check_invariants(holders, written)
