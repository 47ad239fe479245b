"""`watch`: what an engine decides, as one record for the log, the trace, the player and the demos.

    admit     a waiting request gets a row; `count` of its tokens are cached
    wait      no more requests join; `reason`: why the last one that was asked does not
    retract   a running request loses its `count` pages; `reason`: how the estimate changes
    evict     `count` cached pages become free
    split     a node of the radix tree becomes two; the upper one has `count` pages
    capture   a CUDA graph is captured for `count` requests

It watches the methods of one engine from the outside. Engines have no code for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ..request import Request

Method = Callable[..., Any]


@dataclass(frozen=True)
class Decision:
    """See the top of the file for what the fields mean for each kind."""

    kind: str
    request: Request | None = None
    count: int = 0
    reason: str = ""

    def __str__(self) -> str:
        name = "" if self.request is None else self.request.request_id
        pages = "1 page" if self.count == 1 else f"{self.count} pages"
        return {
            "admit": f"admit {name}, cached tokens: {self.count}",
            "wait": f"no more requests join: {self.reason}",
            "retract": f"retract {name}, which holds {pages}; {self.reason}",
            "evict": f"evict {pages}",
            "split": f"split a node after {pages}",
            "capture": f"capture a graph, requests: {self.count}",
        }[self.kind]


Note = Callable[[Decision], None]


def watch(core: Any, note: Note, undo: ExitStack) -> None:
    """Call `note` for each decision of an `EngineCore`, when it is made, until `undo` is closed."""
    scheduler = core.scheduler
    kv_cache = getattr(scheduler, "kv_cache", None)
    radix_cache = getattr(kv_cache, "radix_cache", None)
    graphs = getattr(getattr(core, "runner", None), "graphs", None)
    for owner, name, around in (
        (scheduler, "schedule", _waits),
        (scheduler, "retract", functools.partial(_retracts, scheduler)),
        (kv_cache, "allocate", _admits),
        (radix_cache, "evict", _evicts),
        (radix_cache, "_split", _splits),
        (graphs, "_capture", _captures),
    ):
        if hasattr(owner, name):
            wrap(undo, owner, name, functools.partial(around, note))


def wrap(undo: ExitStack, owner: Any, name: str, around: Callable[[Method], Method]) -> None:
    """Replace a method on the instance; `undo` restores what the instance had before."""
    own = vars(owner).get(name)
    method = getattr(owner, name)
    setattr(owner, name, functools.wraps(method)(around(method)))
    if own is None:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, own)


def _waits(note: Note, method: Method) -> Method:
    def schedule() -> Any:
        batch = method()
        result = getattr(batch, "add_result", None)
        if result is not None and result.name != "CONTINUE":
            note(Decision("wait", reason=result.value))
        return batch

    return schedule


def _retracts(scheduler: Any, note: Note, method: Method) -> Method:
    def retract(request: Request) -> None:
        kv_cache, before = scheduler.kv_cache, scheduler.admission.new_token_ratio
        num_pages, cause = len(kv_cache.pages_of(request)), ""
        if kv_cache.num_free_pages == 0:
            cause = ", because the KV cache pool is full"
        method(request)
        after = scheduler.admission.new_token_ratio
        reason = f"new_token_ratio {before:.2f} -> {after:.2f}{cause}"
        note(Decision("retract", request, num_pages, reason))

    return retract


def _admits(note: Note, method: Method) -> Method:
    def allocate(request: Request) -> Any:
        result = method(request)
        note(Decision("admit", request, request.num_computed_tokens))
        return result

    return allocate


def _evicts(note: Note, method: Method) -> Method:
    def evict(num_pages: int) -> Any:
        if pages := method(num_pages):
            note(Decision("evict", count=len(pages)))
        return pages

    return evict


def _splits(note: Note, method: Method) -> Method:
    def split(node: Any, length: int) -> Any:
        note(Decision("split", count=length))
        return method(node, length)

    return split


def _captures(note: Note, method: Method) -> Method:
    def capture(step: Any) -> None:
        note(Decision("capture", count=step.inputs.descriptor.num_reqs))
        method(step)

    return capture
