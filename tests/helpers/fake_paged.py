"""A paged engine without tensors: the real scheduler, and a memory of hashes.

The "KV" of position p is a hash of three things: all KV before p, which is read back through the
page table; the token; and p. The next token is a hash of all KV. Any wrong slot, stale page or
wrong position therefore changes the tokens. Thousands of schedules run in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import EngineConfig, Request, SamplingParams
from tests.exercises.by_hand import request_with

VOCAB_SIZE = 50


def kv_of(past: tuple[int, ...], token: Any, position: int) -> int:
    return hash((past, token, position))


def next_token(kv: tuple[int, ...]) -> int:
    return hash(kv) % VOCAB_SIZE


def expected_tokens(
    prompt: list[int], max_tokens: int, meaning: Callable[[int], Any] = int
) -> list[int]:
    """Return the expected answer, computed from the token list alone.

    meaning: what the hashes read instead of a token.
    """
    tokens, kv = list(prompt), ()  # type: tuple[list[int], tuple[int, ...]]
    while len(tokens) < len(prompt) + max_tokens:
        for position in range(len(kv), len(tokens)):
            kv = (*kv, kv_of(kv, meaning(tokens[position]), position))
        tokens.append(next_token(kv))
    return tokens[len(prompt) :]


class FakePagedEngine:
    """Adds, steps and aborts requests on a scheduler. Audits the scheduler after every step."""

    def __init__(self, scheduler_module: Any, num_pages: int, **config: Any) -> None:
        config = {"max_model_len": 200, **config}
        self.scheduler = scheduler_module.Scheduler(EngineConfig(**config), num_pages)
        self.table = [[0] * 200 for _ in range(self.scheduler.kv_cache.table.rows.__len__())]
        self.memory: dict[int, int] = {}
        self.live: dict[str, Request] = {}
        self.finished: dict[str, list[int]] = {}
        self.largest_batch = 0

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        request = request_with(params, prompt, name, max_model_len=200)
        self.scheduler.add_request(request)
        self.live[name] = request

    def abort(self, name: str) -> None:
        self.scheduler.finish_request(self.live.pop(name), "abort")
        self._audit()

    def step(self) -> Any:
        """Schedule, "compute" through the page table as a runner sees it, and sample."""
        scheduler = self.scheduler
        batch = scheduler.schedule()
        assert bool(batch.requests) == bool(self.live), (
            "I5: a step must compute something while there are live requests, and nothing otherwise"
        )
        tokens, budget = sum(batch.num_scheduled_tokens), scheduler.max_num_batched_tokens
        assert tokens <= budget, f"a step of {tokens} tokens, and max_num_batched_tokens={budget}"
        assert len(set(batch.requests)) == len(batch.requests), (
            f"I3: a request is scheduled twice in one step: {batch.requests}"
        )
        for row, column, page in scheduler.kv_cache.table.take_updates():
            self.table[row][column] = page
        answers = {}
        for i, (request, n) in enumerate(
            zip(batch.requests, batch.num_scheduled_tokens, strict=True)
        ):
            assert n > 0, f"{request} is scheduled with {n} tokens"
            start = request.num_computed_tokens
            kv = tuple(self.memory[self._slot(request, p)] for p in range(start))
            for position in range(start, start + n):
                value = kv_of(kv, request.token_ids[position], position)
                self.memory[self._slot(request, position)] = value
                kv = (*kv, value)
            if i in batch.sampled_indices:
                answers[i] = next_token(kv)
        for i in batch.sampled_indices:
            request = batch.requests[i]
            computed = request.num_computed_tokens + batch.num_scheduled_tokens[i]
            assert computed == request.num_tokens, (
                f"I1: {request} is sampled when {computed} of its {request.num_tokens} tokens are "
                "computed, and not at its end"
            )
        self._update(batch, [(answers[i], None) for i in batch.sampled_indices])
        self._audit()
        return batch

    def _update(self, batch: Any, sampled: list[Any]) -> None:
        """Tell the scheduler that the batch has been computed. No step overlaps another here."""
        if not batch.requests:
            return
        if hasattr(self.scheduler, "in_flight"):
            self.scheduler.in_flight.advance(batch)
        for output in self.scheduler.update_from_output(batch, sampled):
            if output.finish_reason is not None:
                name = output.request.request_id
                self.finished[name] = output.request.output_token_ids
                del self.live[name]

    def _slot(self, request: Request, position: int) -> int:
        assert request.row is not None, f"I3: {request} is scheduled, but it waits: it has no row"
        page_size = self.scheduler.kv_cache.page_size
        page = self.table[request.row][position // page_size]
        assert page != 0, "I3: a request reads or writes the padding page"
        return page * page_size + position % page_size

    def _audit(self) -> None:
        """Check the scheduler's own invariants, and clear the memory of free pages."""
        self.scheduler.check_invariants()
        queued = [*self.scheduler.waiting, *self.scheduler.running]
        assert set(queued) == set(self.live.values()) and len(queued) == len(self.live), (
            f"I3: each live request either waits or runs: queued {queued}, live {[*self.live]}"
        )
        page_size = self.scheduler.kv_cache.page_size
        for page in self.scheduler.kv_cache.allocator.free_pages:
            for slot in range(page * page_size, (page + 1) * page_size):
                self.memory.pop(slot, None)
