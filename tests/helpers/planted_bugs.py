"""Bugs that a test plants into engines, one at a time. The soak must find each of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from common import LLMEngine
from common.guard import HeldInterrupts
from common.text.output_processor import OutputProcessor
from milestones.chain import load

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Bug:
    """A bug, and the schedules among which the soak must find it."""

    plant: Plant
    milestone: str
    kind: str  # the soak's name for the failure; "" if it depends on the moment of the interrupt
    schedules: range
    interrupts: bool
    failures: bool
    seed: int = 0


BUGS: dict[str, Bug] = {}


def bug(
    milestone: str,
    kind: str = "wrong",
    *,
    at: int = 0,
    interrupts: bool = False,
    failures: bool = False,
) -> Any:
    """Register a bug under the name of its function.

    at: the number of the first schedule to try.
    interrupts, failures: whether the bug shows only in schedules that have them.
    """

    def register(plant: Plant) -> Plant:
        schedules = range(at, at + 100)
        BUGS[plant.__name__] = Bug(plant, milestone, kind, schedules, interrupts, failures)
        return plant

    return register


def of(milestone: str, module: str, name: str) -> Any:
    return getattr(load(milestone, module), name)


@bug("m2_continuous", at=4)
def a_row_moved_one_token_short(patch: pytest.MonkeyPatch) -> None:
    pool = of("m2_continuous", "kv_pool", "KVPool")
    move = pool.move
    patch.setattr(pool, "move", lambda self, m: move(self, m._replace(num_tokens=m.num_tokens - 1)))


@bug("m3_paged")
def a_page_freed_twice(patch: pytest.MonkeyPatch) -> None:
    """A page is freed twice when a request of more than one page is retracted or ends."""
    manager = of("m3_paged", "kv_cache", "KVCacheManager")
    free = manager.free

    def twice(self: Any, request: Any) -> None:
        pages = list(self.pages_of(request))[1:2]
        free(self, request)
        self.allocator.free(pages)

    patch.setattr(manager, "free", twice)


@bug("m3_paged")
def a_retracted_request_keeps_its_count(patch: pytest.MonkeyPatch) -> None:
    retraction = of("m3_paged", "scheduler", "Scheduler")
    send_back = retraction.send_back

    def keeping(self: Any, request: Any) -> None:
        before = request.num_computed_tokens
        send_back(self, request)
        request.num_computed_tokens = before

    patch.setattr(retraction, "send_back", keeping)


@bug("m4_radix")
def a_lock_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The prefix that a request finds is not locked when the request is admitted."""
    manager, cache = (
        of("m4_radix", "kv_cache", "KVCacheManager"),
        of("m4_radix", "radix_cache", "RadixCache"),
    )
    allocate, lock = manager.allocate, cache.lock

    def without_lock(self: Any, request: Any) -> None:
        cache.lock = lambda *_: None
        try:
            allocate(self, request)
        finally:
            cache.lock = lock

    patch.setattr(manager, "allocate", without_lock)


@bug("m5_overlap")
def one_buffer_for_two_steps(patch: pytest.MonkeyPatch) -> None:
    """The inputs of a step overwrite inputs that the step in flight still reads."""
    runner, buffers = (
        of("m5_overlap", "model_runner", "ModelRunner"),
        of("m5_overlap", "buffers", "StepBuffers"),
    )
    init = runner.__init__

    def with_one(self: Any, *args: Any) -> None:
        init(self, *args)
        self.buffers.pop()

    patch.setattr(runner, "__init__", with_one)
    patch.setattr(buffers, "begin", lambda self: setattr(self, "used", 0))


@bug("m5_overlap", at=4)
def a_stale_page_table(patch: pytest.MonkeyPatch) -> None:
    """The forward gets the pages of a row as they were when the row last grew."""
    table = of("m5_overlap", "kv_cache", "PageTable")

    def quietly(self: Any, row: int, pages: Any) -> list[int]:
        replaced = [old for old, new in zip(self.rows[row], pages, strict=False) if old != new]
        self.rows[row][: len(pages)] = pages
        return replaced

    patch.setattr(table, "replace", quietly)


@bug("m3_paged", "lost")
def an_aborted_request_without_its_output(patch: pytest.MonkeyPatch) -> None:
    abort = OutputProcessor.abort

    def silently(self: OutputProcessor, request: Any) -> None:
        abort(self, request)
        del self.changed[request], self.requests[request.request_id]

    patch.setattr(OutputProcessor, "abort", silently)


@bug("m4_radix")
def a_page_cached_before_it_is_full(patch: pytest.MonkeyPatch) -> None:
    """The tree counts one token too many: only the next step writes its KV."""
    manager = of("m4_radix", "kv_cache", "KVCacheManager")
    insert = manager.insert

    def early(self: Any, request: Any) -> None:
        request.num_computed_tokens += 1
        try:
            insert(self, request)
        finally:
            request.num_computed_tokens -= 1

    patch.setattr(manager, "insert", early)


@bug("m1_single")
def a_draw_that_depends_on_the_step(patch: pytest.MonkeyPatch) -> None:
    """I2: the random number of a token is taken at the wrong position."""
    module = importlib.import_module("common.sampling.sampler")
    uniform = module.uniform
    patch.setattr(module, "uniform", lambda seeds, positions: uniform(seeds, positions - 1))


@bug("m3_paged", "stuck", at=10)
def a_prompt_that_waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    """I5: a request waits until all its expected pages fit, even if no other request runs."""
    admission = of("m3_paged", "admission", "Admission")
    fits = admission.fits

    def cautious(self: Any, request: Any, running: Any) -> bool:
        has_pages = self.expected_pages(request) < self.kv_cache.num_free_pages
        return has_pages and bool(fits(self, request, running))

    patch.setattr(admission, "fits", cautious)


@bug("m5_overlap", failures=True)
def a_failed_step_that_is_not_undone(patch: pytest.MonkeyPatch) -> None:
    """The lengths of a step that failed stay with its requests, and so do their placeholders."""
    steps = of("m5_overlap", "in_flight", "StepsInFlight")
    patch.setattr(steps, "undo", lambda self, batch: self.batches.pop())


@bug("m4_radix", "lost", interrupts=True)
def an_output_dropped_on_an_interrupt(patch: pytest.MonkeyPatch) -> None:
    settle_interrupted = LLMEngine.settle_interrupted

    def dropping(self: LLMEngine, name: str, returned: Any) -> None:
        if name != "step":
            settle_interrupted(self, name, returned)

    patch.setattr(LLMEngine, "settle_interrupted", dropping)


@bug("m3_paged", "", interrupts=True)
def interrupts_that_are_not_held_back(patch: pytest.MonkeyPatch) -> None:
    """A handler runs in the middle of a step, wherever the signal arrives."""
    patch.setattr(HeldInterrupts, "__enter__", lambda self: self)
    patch.setattr(HeldInterrupts, "__exit__", lambda *_: None)


@bug("structured_output")
def masks_of_other_rows(patch: pytest.MonkeyPatch) -> None:
    manager = of("structured_output", "grammar_manager", "GrammarManager")
    masks = manager.masks

    def turned(self: Any, requests: Any) -> Any:
        rows, bits = masks(self, requests)
        return rows, bits[::-1].copy()

    patch.setattr(manager, "masks", turned)


@bug("lora")
def versions_that_share_prefixes(patch: pytest.MonkeyPatch) -> None:
    """A new version of an adapter finds the keys and values of the old one."""
    patch.setattr(load("lora", "kv_cache"), "ADAPTER_KEY", 0)


@bug("embedding")
def a_mean_of_the_last_chunk(patch: pytest.MonkeyPatch) -> None:
    def replace(request: Any, row: Any, start: int) -> None:
        request.partial_sum = row

    patch.setattr(load("embedding", "engine"), "accumulate", replace)


@bug("speculative")
def refused_drafts_keep_their_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(of("speculative", "drafting", "Drafting"), "free_refused", lambda *_: None)


@bug("priority", at=27)
def a_step_that_does_not_wait_for_its_pages(patch: pytest.MonkeyPatch) -> None:
    runner = of("priority", "model_runner", "ModelRunner")
    copy_pages = runner.copy_pages

    def forgotten(self: Any, transfers: Any) -> None:
        copy_pages(self, transfers)
        self.copied = None

    patch.setattr(runner, "copy_pages", forgotten)


@bug("hybrid_memory", at=1)
def a_prefix_without_its_state(patch: pytest.MonkeyPatch) -> None:
    """A request that finds a cached prefix begins with an empty state."""
    pool = of("hybrid_memory", "state_pool", "StatePool")
    step = pool.step

    def empty(self: Any, states: Any) -> Any:
        states.loads = [(row, None) for row, _snapshot in states.loads]
        return step(self, states)

    patch.setattr(pool, "step", empty)
