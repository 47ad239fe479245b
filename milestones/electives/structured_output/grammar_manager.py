"""`GrammarManager`: requests that wait for a grammar, and the place of each request in its grammar.

    add_request --> queue --compiled--> the waiting queue of m5 --> running
                      |
                      +--bad, or too late--> ends with an error

No tensors. Compiling may take seconds, so separate threads do it. Other requests, including those
that arrive later, do not wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from weakref import WeakKeyDictionary

import numpy as np

from common import Request, StructuredOutputsParams

from .grammar import Grammar

Compile = Callable[[StructuredOutputsParams], Grammar]
TIMEOUT = 30.0  # seconds that a request waits for its grammar
NUM_THREADS = 2
NUM_CACHED = 256  # grammars


class GrammarCompiler:
    """Compiles on threads, and keeps the newest grammars. Any thread may call it.

    All requests with the same parameters share one compiled grammar, also while it is compiled.
    """

    def __init__(self, compile_grammar: Compile) -> None:
        self.compile = compile_grammar
        self.threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self.lock = threading.Lock()
        self.cache: dict[StructuredOutputsParams, Future[Grammar]] = {}  # least recently used first
        self.waiters: WeakKeyDictionary[Future[Grammar], int] = WeakKeyDictionary()

    def submit(self, structured: StructuredOutputsParams) -> Future[Grammar]:
        """Return a future of the grammar in its first state. Compile it if it is not cached."""
        with self.lock:
            future = self.cache.pop(structured, None)
            if future is None or not _may_be_shared(future):
                future = self.threads.submit(self.compile, structured)
            self.waiters[future] = self.waiters.get(future, 0) + 1
            self.cache[structured] = future
            if len(self.cache) > NUM_CACHED:
                del self.cache[next(iter(self.cache))]
        return future

    def abandon(self, future: Future[Grammar]) -> None:
        """Take note that one caller of `submit` no longer waits for this future.

        Without callers that wait, a compilation is cancelled, or ended if it runs. Otherwise the
        threads would be busy with work for requests that have ended.
        """
        with self.lock:
            self.waiters[future] -= 1
            if self.waiters[future] or future.done():
                return
            stop = getattr(self.compile, "stop", None)
            if not future.cancel() and stop is None:
                return  # it goes on, and a later caller may get its result
            for structured in [key for key, kept in self.cache.items() if kept is future]:
                del self.cache[structured]
                if stop is not None:
                    stop(structured)

    def close(self) -> None:
        """Compile no more grammars, and end what is being compiled."""
        getattr(self.compile, "close", lambda: None)()
        self.threads.shutdown(wait=True, cancel_futures=True)


def _may_be_shared(future: Future[Grammar]) -> bool:
    """Return whether a cached future is a grammar, a refusal of one, or not done yet.

    Other failures, such as a `MemoryError`, say nothing about the grammar.
    """
    if not future.done():
        return True
    return not future.cancelled() and isinstance(future.exception(), ValueError | None)


class GrammarManager:
    """Holds a request in `queue` until it is compiled, and its grammar in `grammars` from then on.

    I3: a request that has ended is in neither of them.
    """

    def __init__(self, compiler: GrammarCompiler | None = None, num_words: int = 0) -> None:
        """compiler: None for an engine without grammars. num_words: of a bitmask, W."""
        self.compiler = compiler
        self.num_words = num_words
        self.timeout = TIMEOUT
        self.queue: dict[Request, tuple[Future[Grammar], float]] = {}  # with the deadline
        self.grammars: dict[Request, Grammar] = {}

    def add_request(self, request: Request) -> None:
        """Queue a request until its grammar is compiled."""
        structured = request.params.structured_outputs
        assert structured is not None and self.compiler is not None, "nothing to compile"
        future = self.compiler.submit(structured)
        self.queue[request] = (future, time.monotonic() + self.timeout)

    def take_compiled(self) -> list[tuple[Request, str | None]]:
        """Remove from the queue all requests that need not wait any longer. Do not block.

        Returns each with None if its grammar is compiled, and otherwise with the reason why it
        ends: its grammar is bad, or was not compiled in time. The oldest request comes first.
        Each request gets a copy of the compiled grammar, because requests move independently.
        """
        taken: list[tuple[Request, str | None]] = []
        for request, (future, deadline) in list(self.queue.items()):
            reason = None
            if future.done():
                error = future.exception()
                if error is None:
                    self.grammars[request] = future.result().fork()
                else:
                    reason = str(error) or repr(error)
            elif time.monotonic() >= deadline:
                reason = f"structured_outputs were not compiled within {self.timeout:g} s"
                self.abandon(future)
            else:
                continue
            del self.queue[request]
            taken.append((request, reason))
        return taken

    def wait(self, seconds: float) -> None:
        """Block until a grammar of the queue is compiled, and no longer than `seconds`."""
        wait([future for future, _ in self.queue.values()], seconds, FIRST_COMPLETED)

    def accept(self, request: Request, token_id: int | None) -> str | None:
        """Take the next token of a request into its grammar. Return why it cannot be taken."""
        grammar = self.grammars.get(request)
        if grammar is None:
            return None
        if token_id is None:
            return grammar.error or (
                "no token can be chosen: the logits are not finite, or the grammar allows only "
                "tokens that min_tokens excludes"
            )
        assert token_id >= 0, "I2: a grammar never sees a placeholder"
        if grammar.accept(token_id):
            return None
        return grammar.error or f"the grammar does not allow the sampled token {token_id}"

    def awaits_tokens(self, requests: Sequence[Request]) -> bool:
        """Return whether masks of these requests depend on tokens that a step in flight samples.

        This is so if the newest token of a request with a grammar is a placeholder.
        """
        return any(r.token_ids[-1] < 0 for r in requests if r in self.grammars)

    def close(self) -> None:
        """Start to compile no more grammars, and wait for those that are being compiled."""
        if self.compiler is not None:
            self.compiler.close()

    def masks(self, requests: Sequence[Request]) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that have a grammar, [n], and their bits, [n, W] int32.

        A row is an index in `requests`. Requests that have ended have no grammar any more.
        """
        rows = [row for row, request in enumerate(requests) if request in self.grammars]
        bits = np.zeros((len(rows), self.num_words), np.int32)
        for place, row in enumerate(rows):
            self.grammars[requests[row]].fill(bits[place])
        return np.array(rows, np.int64), bits

    def remove(self, request: Request) -> bool:
        """Forget a request. Return whether it was still waiting for its grammar."""
        self.grammars.pop(request, None)
        waiting = self.queue.pop(request, None)
        if waiting is not None:
            self.abandon(waiting[0])
        return waiting is not None

    def abandon(self, future: Future[Grammar]) -> None:
        """Tell the compiler that a request of the queue no longer waits."""
        assert self.compiler is not None, "nothing was compiled"
        self.compiler.abandon(future)
