"""Bugs that a test plants into engines, one at a time. The soak must find each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from milestones.chain import package
from tests.helpers.replaced import plant

BUGS: dict[str, Bug] = {}


@dataclass
class Bug:
    """A decorator that registers a mistake in `BUGS`, under the name of its function.

    The fields say what the mistake replaces, and where the soak must find it.
    """

    milestone: str
    place: str  # what it replaces, in the package of the milestone or in `common`
    kind: str = "wrong"  # the soak's name for the failure; "" if it depends on the moment
    at: int = 0  # the number of the first schedule to try
    interrupts: bool = False  # whether the bug shows only in schedules that have them
    failures: bool = False
    mistake: Callable[..., Any] = field(init=False)

    def __call__(self, mistake: Callable[..., Any]) -> Callable[..., Any]:
        """mistake: called with the original, and then with the arguments."""
        self.mistake = mistake
        BUGS[mistake.__name__] = self
        return mistake

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        is_common = self.place.startswith("common.")
        target = self.place if is_common else f"{package(self.milestone)}.{self.place}"
        plant(patch, target, self.mistake)


@Bug("m2_continuous", "kv_pool.KVPool.move", at=4)
def a_row_moved_one_token_short(move: Any, self: Any, row_move: Any) -> None:
    move(self, row_move._replace(num_tokens=row_move.num_tokens - 1))


@Bug("m3_paged", "kv_cache.KVCacheManager.free")
def a_page_freed_twice(free: Any, self: Any, request: Any) -> None:
    """A page is freed twice when a request of more than one page is retracted or ends."""
    pages = list(self.pages_of(request))[1:2]
    free(self, request)
    self.allocator.free(pages)


@Bug("m3_paged", "scheduler.Scheduler.send_back")
def a_retracted_request_keeps_its_count(send_back: Any, self: Any, request: Any) -> None:
    before = request.num_computed_tokens
    send_back(self, request)
    request.num_computed_tokens = before


@Bug("m4_radix", "kv_cache.KVCacheManager.allocate")
def a_lock_forgotten(allocate: Any, self: Any, request: Any) -> None:
    """The prefix that a request finds is not locked when the request is admitted."""
    self.radix_cache.lock = lambda *_: None
    try:
        allocate(self, request)
    finally:
        del self.radix_cache.lock


@Bug("m5_overlap", "model_runner.ModelRunner.__init__")
def one_buffer_for_two_steps(init: Any, self: Any, *args: Any) -> None:
    """The inputs of a step overwrite inputs that the step in flight still reads."""
    init(self, *args)
    self.buffers.pop()
    (buffer,) = self.buffers
    buffer.begin = lambda: setattr(buffer, "used", 0)


@Bug("m5_overlap", "kv_cache.PageTable.replace", at=4)
def a_stale_page_table(_: Any, self: Any, row: int, pages: Any) -> list[int]:
    """The forward gets the pages of a row as they were when the row last grew."""
    replaced = [old for old, new in zip(self.rows[row], pages, strict=False) if old != new]
    self.rows[row][: len(pages)] = pages
    return replaced


@Bug("m3_paged", "common.text.output_processor.OutputProcessor.abort", "lost")
def an_aborted_request_without_its_output(abort: Any, self: Any, request: Any) -> None:
    abort(self, request)
    del self.changed[request], self.requests[request.request_id]


@Bug("m4_radix", "kv_cache.KVCacheManager.insert")
def a_page_cached_before_it_is_full(insert: Any, self: Any, request: Any) -> None:
    """The tree counts one token too many: only the next step writes its KV."""
    request.num_computed_tokens += 1
    try:
        insert(self, request)
    finally:
        request.num_computed_tokens -= 1


@Bug("m1_single", "common.sampling.draws.uniform")
def a_draw_that_depends_on_the_step(uniform: Any, seeds: Any, positions: Any) -> Any:
    """I2: the random number of a token is taken at the wrong position."""
    return uniform(seeds, positions - 1)


@Bug("m3_paged", "admission.Admission.fits", "stuck", at=10)
def a_prompt_that_waits_for_ever(fits: Any, self: Any, request: Any, running: Any) -> bool:
    """I5: a request waits until all its expected pages fit, even if no other request runs."""
    has_pages = self.expected_pages(request) < self.kv_cache.num_free_pages
    return has_pages and bool(fits(self, request, running))


@Bug("m5_overlap", "in_flight.StepsInFlight.undo", failures=True)
def a_failed_step_that_is_not_undone(_: Any, self: Any, batch: Any) -> None:
    """The lengths of a step that failed stay with its requests, and so do their placeholders."""
    self.batches.pop()


@Bug("m4_radix", "common.llm_engine.LLMEngine.settle_interrupted", "lost", interrupts=True)
def an_output_dropped_on_an_interrupt(settle: Any, self: Any, name: str, returned: Any) -> None:
    if name != "step":
        settle(self, name, returned)


@Bug("m3_paged", "common.guard.HeldInterrupts.__enter__", "", interrupts=True)
def interrupts_that_are_not_held_back(_: Any, self: Any) -> Any:
    """A handler runs in the middle of a step, wherever the signal arrives."""
    return self


@Bug("structured_output", "grammar_manager.GrammarManager.masks")
def masks_of_other_rows(masks: Any, self: Any, requests: Any) -> Any:
    rows, bits = masks(self, requests)
    return rows, bits[::-1].copy()


@Bug("lora", "kv_cache.KVCacheManager.cache_key")
def versions_that_share_prefixes(cache_key: Any, self: Any, request: Any, num_tokens: int) -> Any:
    """A new version of an adapter finds the keys and values of the old one."""
    return list(request.token_ids[:num_tokens])


@Bug("embedding", "engine.accumulate")
def a_mean_of_the_last_chunk(_: Any, request: Any, row: Any, start: int) -> None:
    request.partial_sum = row


@Bug("speculative", "drafting.Drafting.free_refused")
def refused_drafts_keep_their_pages(*_: Any) -> None:
    """Free no page."""


@Bug("priority", "model_runner.ModelRunner.copy_pages", at=27)
def a_step_that_does_not_wait_for_its_pages(copy_pages: Any, self: Any, transfers: Any) -> None:
    copy_pages(self, transfers)
    self.copied = None


@Bug("hybrid_memory", "state_pool.StatePool.step", at=1)
def a_prefix_without_its_state(step: Any, self: Any, states: Any) -> Any:
    """A request that finds a cached prefix begins with an empty state."""
    states.loads = [(row, None) for row, _snapshot in states.loads]
    return step(self, states)
