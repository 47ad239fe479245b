"""`Scheduler`: which requests a step computes, and how many tokens of each.

Plain Python data, no tensors. A step computes one token of each decoding request and, in the room
that is left, chunks of prompts. Upholds I5: the policy bounds how long a request waits, and the
oldest running request makes progress in every step.

The scheduler plans a step while the previous one is in flight. Planning knows lengths, and which
requests reach `max_tokens`; it does not know token ids.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict

from common import EngineConfig, EngineStats, FinishReason, Request
from common.engine_core import EngineCoreOutput, SampledToken, append_token
from common.outputs import StepCounters

from .add_req_result import AddReqResult
from .admission import Admission
from .in_flight import StepsInFlight, continuing, num_rows
from .kv_cache import KVCacheManager
from .policy import SchedulePolicy
from .schedule_batch import ScheduleBatch


class Scheduler:
    """Owns the waiting queue and the running list. A live request is in exactly one of them."""

    def __init__(self, config: EngineConfig, num_pages: int) -> None:
        self.max_num_batched_tokens = config.max_num_batched_tokens
        # A decode step computes a token of each running request, so the token budget bounds them.
        self.max_num_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.kv_cache = KVCacheManager(num_rows(config), num_pages, config.page_size)
        self.policy = SchedulePolicy(config, self.kv_cache)
        self.waiting: deque[Request] = deque()  # oldest first
        self.running: list[Request] = []  # oldest first
        self.in_flight = StepsInFlight(self.kv_cache)
        self.counters = StepCounters()
        self.admission = Admission(config, self.kv_cache, self.policy)
        self.disable_consecutive_prefill_overlap = config.disable_consecutive_prefill_overlap

    def add_request(self, request: Request) -> None:
        """Append a request to the waiting queue.

        Raises `ValueError` for a prompt that the pool could never hold (I4). A request with an
        output that outgrows the pool finishes by length when it fills the pool.
        """
        max_kv_tokens = self.kv_cache.max_tokens
        if request.num_tokens > max_kv_tokens:
            raise ValueError(
                f"prompt has {request.num_tokens} tokens, more than the KV pool's "
                f"{max_kv_tokens} (num_pages={self.kv_cache.allocator.num_pages} of "
                f"page_size={self.kv_cache.page_size})"
            )
        request.max_num_tokens = min(request.max_num_tokens, max_kv_tokens + 1)
        self.policy.on_arrival(request, len(self.waiting))
        self.waiting.append(request)

    def schedule(self) -> ScheduleBatch:
        """Choose one token of each decoding request, then chunks of prompts.

        Chunks of running requests come before chunks of requests that join.
        """
        batch = ScheduleBatch()
        running = continuing(self.running)
        # Decodes first: a chunk must not take the page that a decode needs.
        for request in running:
            if request.row is not None and request.num_uncomputed_tokens == 1:
                self.retract_for(request)
                if request.row is not None:
                    self._add(batch, request, 1)
        for request in running:
            if request.row is not None and request.num_uncomputed_tokens > 1:
                if not batch.requests:  # I5: the oldest request must make progress
                    self.retract_for(request)
                self._add_chunk(batch, request)
        self._admit_waiting(batch)
        self.admission.expect_less()
        if batch.requests:
            self.in_flight.batches.append(batch)
        return batch

    def needs_result(self) -> bool:
        """Return whether the next step must not be planned before the step in flight completes.

        There are three reasons. A request that finishes in this step may free enough pages to avoid
        a retraction. Or a waiting request needs a prefix that the step in flight computes. Or both
        steps compute prompts, and the configuration forbids to overlap them.
        """
        new_pages = self.kv_cache.num_new_pages(continuing(self.running))
        return (
            new_pages > self.kv_cache.num_free_pages
            or self.admission.waits_for_step(self.waiting, self.running, self.in_flight.batches)
            or (self.disable_consecutive_prefill_overlap and self.is_prefill_next())
        )

    def is_prefill_next(self) -> bool:
        """Return whether the step in flight and the next one both compute parts of prompts."""
        computed = [request for batch in self.in_flight.batches for request in batch.requests]
        if all(request.num_output_tokens > 1 for request in computed):
            return False
        return any(r.num_uncomputed_tokens > 1 for r in continuing(self.running)) or (
            bool(self.waiting)
            and self.admission.budget_state(ScheduleBatch(), self.running) is AddReqResult.CONTINUE
        )

    def update_from_output(
        self, batch: ScheduleBatch, sampled: list[SampledToken]
    ) -> list[EngineCoreOutput]:
        """Complete a computed batch, append its tokens, and count.

        Its requests have been advanced already. For a request that has finished since the launch,
        the step was useless, and its token is dropped.
        """
        self.in_flight.complete(batch)
        self.counters.num_steps += 1
        of_prompts = of_finished = 0
        for request, num_tokens in batch.tokens_per_request():
            before = request.num_computed_tokens - num_tokens
            if request.is_finished:
                of_finished += num_tokens
            elif before < request.num_prompt_tokens:
                of_prompts += min(num_tokens, request.num_prompt_tokens - before)
                self.kv_cache.insert(request)  # from here on, other requests can match these pages
        self.counters.padding_tokens += of_finished
        self.counters.prefill_tokens += of_prompts
        self.counters.decode_tokens += batch.num_tokens - of_finished - of_prompts
        outputs = []
        for request, token in zip(batch.sampled_requests, sampled, strict=True):
            if request.is_finished:
                continue
            outputs.append(output := append_token(request, token))
            if output.finish_reason is not None:
                self.finish_request(request, output.finish_reason)
        return outputs

    def undo(self, batch: ScheduleBatch) -> None:
        """Undo `schedule` for the newest batch in flight. Free what was allocated for it."""
        self.in_flight.undo(batch)
        for request in reversed([r for r in batch.requests if not r.is_finished]):
            if request.num_computed_tokens == 0:
                self.send_back(request)
            else:
                self.kv_cache.free_slots(request, request.num_computed_tokens)

    def finish_request(self, request: Request, reason: FinishReason) -> None:
        """End a request, remove it from its queue, and free its memory."""
        request.finish_reason = reason
        self.policy.on_removal(request)
        if request.row is None:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self.in_flight.free(request)
        if not self.waiting and not self.running:
            self.admission.reset()

    def retract_for(self, request: Request) -> None:
        """Retract the newest requests until `request` can compute a token.

        The last one to be retracted is `request` itself.
        """
        while request.row is not None and self.kv_cache.available_slots(request) == 0:
            self.retract(self.running[-1])

    def retract(self, request: Request) -> None:
        """Free all memory of a running request. It will compute its tokens again.

        vLLM calls this preemption by recomputation.
        """
        assert not self.in_flight.batches, (
            f"cannot retract {request} while a step that computes it is in flight"
        )
        self.admission.expect_more(self.running)
        self.counters.num_retractions += 1
        self.send_back(request)

    def send_back(self, request: Request) -> None:
        """Free the memory of a running request, and move it to the head of the waiting queue.

        It is older than all waiting requests, and it keeps its tokens.
        """
        self.running.remove(request)
        self.kv_cache.free(request)
        request.num_computed_tokens = 0
        self.policy.on_retraction(request)
        self.waiting.appendleft(request)

    def make_stats(self) -> EngineStats:
        """Return the counters, and the state of the queues and of the KV cache."""
        return EngineStats(
            num_waiting=len(self.waiting),
            num_running=len(self.running),
            kv_tokens_reserved=self.kv_cache.num_reserved_tokens,
            kv_tokens_used=self.kv_cache.num_used_tokens([*self.running, *self.in_flight.finished]),
            kv_pages_total=self.kv_cache.allocator.num_pages,
            kv_pages_free=len(self.kv_cache.allocator.free_pages),
            kv_pages_cached=self.kv_cache.radix_cache.evictable_size,
            **asdict(self.counters),
        )

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the queues or the KV cache break an invariant."""
        assert len(self.running) <= self.max_num_running, (
            f"I5: {len(self.running)} requests run, more than {self.max_num_running}"
        )
        for request in self.waiting:
            assert request.num_computed_tokens == 0, f"I3: {request} waits, but it holds KV"
        self.in_flight.check_invariants(self.running)

    def _add(self, batch: ScheduleBatch, request: Request, num_tokens: int) -> None:
        """Schedule the next `num_tokens` tokens of a request, and allocate their pages."""
        self.kv_cache.allocate_slots(request, request.num_computed_tokens + num_tokens)
        batch.add(request, num_tokens)

    def _add_chunk(self, batch: ScheduleBatch, request: Request) -> None:
        """Schedule as many tokens of a request as this step and the pool have room for."""
        budget = self.max_num_batched_tokens - batch.num_tokens
        chunk = min(request.num_uncomputed_tokens, budget, self.kv_cache.available_slots(request))
        if chunk > 0:
            self._add(batch, request, chunk)

    def _admit_waiting(self, batch: ScheduleBatch) -> None:
        """Let waiting requests run, as the policy orders them, and schedule their first chunks."""
        if not self.waiting:
            return
        batch.add_result = self.admission.budget_state(batch, self.running)
        if batch.add_result is not AddReqResult.CONTINUE:
            return  # none can join, so their order does not matter
        for request in self.policy.order(self.waiting):
            batch.add_result = self.admission.check(request, batch, self.running)
            if batch.add_result is AddReqResult.PREFIX_IN_FLIGHT:
                continue
            if batch.add_result is not AddReqResult.CONTINUE:
                break
            self._admit(request)
            self._add_chunk(batch, request)

    def _admit(self, request: Request) -> None:
        """Move a request from the waiting queue to the running list, and give it a row.

        The row begins with the request's cached prefix.
        """
        self.waiting.remove(request)
        self.policy.on_admission(request)
        self.kv_cache.allocate(request)
        self.running.append(request)
        cached = min(request.num_computed_tokens, request.num_prompt_tokens)
        self.counters.cached_prompt_tokens += cached
        if request.num_cached_tokens is None:  # after a retraction, it finds its own pages
            request.num_cached_tokens = cached
