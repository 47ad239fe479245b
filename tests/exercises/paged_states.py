"""Paged schedulers in a state built by hand: running requests with given tokens and pages."""

from __future__ import annotations

from typing import Any

from common import EngineConfig, Request
from m3_paged.scheduler import Scheduler
from tests.exercises.by_hand import make_request, names

PAGE_SIZE = 4


def make_scheduler(num_pages: int, **config: Any) -> Scheduler:
    """Return a scheduler without requests, with pages of 4 tokens."""
    # With "auto", a configuration imports torch, to ask for the GPU.
    config = {
        "device": "cpu",
        "max_model_len": 200,
        "max_num_seqs": 8,
        "page_size": PAGE_SIZE,
        **config,
    }
    return Scheduler(EngineConfig(**config), num_pages)


def run(
    scheduler: Scheduler, name: str, prompt: int, *, output: int = 1, max_tokens: int = 12,
    computed: int | None = None,
) -> Request:  # fmt: skip
    """Let a request run, with the pages of its computed tokens, and return the request.

    By default all tokens are computed but the newest.
    """
    request = make_request(name, prompt, output=output, max_tokens=max_tokens)
    request.num_computed_tokens = prompt + output - 1 if computed is None else computed
    kv_cache = scheduler.kv_cache
    request.row = kv_cache.free_rows.pop()
    pages = -(-request.num_computed_tokens // kv_cache.page_size)
    kv_cache.table.append(request.row, kv_cache.allocator.allocate(pages))
    scheduler.running.append(request)
    return request


def wait(scheduler: Scheduler, name: str, prompt: int, *, max_tokens: int = 12) -> Request:
    """Let a request wait, and return it."""
    request = make_request(name, prompt, max_tokens=max_tokens)
    scheduler.add_request(request)
    return request


def show(scheduler: Scheduler) -> str:
    """Return the running requests with their pages, the queue and the free pages, for messages."""
    pages = {r.request_id: len(scheduler.kv_cache.pages_of(r)) for r in scheduler.running}
    return (
        f"running, with pages: {pages}; waiting: {names(scheduler.waiting)}; "
        f"{scheduler.kv_cache.num_free_pages} pages free"
    )
