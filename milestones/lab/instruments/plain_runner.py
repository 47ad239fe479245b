"""A model runner in plain Python, so that the core of each milestone runs without torch and numpy.

It gives the answers of the hash model (see `hash_chain`), computed from the token lists alone. It
therefore shows what a scheduler decides, and not whether keys and values are in the right place.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from common import Request
from common.engine_core import SampledToken

from .hash_chain import HashChain


class PlainResult:
    """The tokens of a step: `rows` for engines that compute at once, `wait` for the others."""

    def __init__(self, tokens: list[SampledToken]) -> None:
        self.tokens = tokens

    def rows(self) -> list[SampledToken]:
        return self.tokens

    def wait(self) -> list[SampledToken]:
        return self.tokens


class PlainRunner:
    """The part of a `ModelRunner` that the cores of all milestones use."""

    def __init__(self, num_pages: int = 64) -> None:
        self.kv_pool = SimpleNamespace(num_pages=num_pages, release=lambda: None)
        self.graphs = SimpleNamespace(num_replays=0)
        self.chains: WeakKeyDictionary[Request, HashChain] = WeakKeyDictionary()

    def run(self, batch: Any, memory: Any = None) -> PlainResult:
        """Return the next tokens. memory: the moves of m2, or the page table, with its news."""
        if isinstance(memory, list):
            memory.clear()
        elif memory is not None:
            memory.take_updates()
        requests = getattr(batch, "sampled_requests", batch.requests)
        return PlainResult([(self._next_token(request), None) for request in requests])

    launch = run

    def free(self, requests: Iterable[Request]) -> None:
        """Let requests start again, as the runner of m1 does when it drops their cache."""
        for request in requests:
            request.num_computed_tokens = 0

    def check_invariants(self, running: list[Request]) -> None: ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...

    def _next_token(self, request: Request) -> int:
        """Return what follows a request's tokens. A placeholder is the token that followed last."""
        chain = self.chains.get(request)
        if chain is None or chain.num_tokens > request.num_tokens:  # a step was undone
            chain = self.chains[request] = HashChain([])
        for token in request.token_ids[chain.num_tokens :]:
            chain.feed(chain.next_token() if token < 0 else token)
        return chain.next_token()
