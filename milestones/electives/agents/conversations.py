"""`Conversations`: when paused conversations are expected to call again. Plain Python data.

    request   | call 1 |          | call 2 |             | last call |
    pause              | tool ... |        | tool ...... |           release
    prefix      locked   protected  locked    protected     locked     evicted first

A hint names the conversation of a request. Its prefix is protected from the end of a call until the
next call has locked it, but not for ever. Hints change which pages are evicted, and nothing else.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from common import AgentHint, Request

from .hi_radix_cache import HiRadixCache
from .pause_estimate import PauseEstimate
from .radix_cache import TreeNode

MOST_CONVERSATIONS = 4096  # with remembered pauses; those that called longest ago are forgotten
PATIENCE = 4.0  # without a time to live, protection lasts that many expected pauses


class Conversation:
    """The pauses of a conversation so far, and when the present one began."""

    def __init__(self) -> None:
        self.estimate = PauseEstimate()
        self.paused_at: float | None = None


class Conversations:
    """Protects the prefixes of paused conversations, and learns how long they pause."""

    def __init__(self, cache: HiRadixCache) -> None:
        self.cache = cache
        self.use_clock(time.perf_counter)
        self.known: OrderedDict[str, Conversation] = OrderedDict()  # by id; oldest call first
        self.everyone = PauseEstimate()

    def use_clock(self, now: Callable[[], float]) -> None:
        """Read the time from this function from now on: an engine has a clock of its own."""
        self.now = self.cache.now = now

    def arrive(self, request: Request) -> None:
        """Note that a call has arrived. While it waits, its prefix is evicted last."""
        if request.agent_hint is None:
            return
        now, session_id = self.now(), request.agent_hint.session_id
        conversation = self._find(session_id)
        if conversation.paused_at is not None:
            conversation.estimate.observe(now - conversation.paused_at)
            self.everyone.observe(now - conversation.paused_at)
            conversation.paused_at = None
        self.cache.expect(session_id, now)

    def forget(self, request: Request) -> None:
        """Note that a call has ended while it waited. A call that is aborted is the last one."""
        if request.agent_hint is not None:
            self.known.pop(request.agent_hint.session_id, None)
            self.cache.end_pause(request.agent_hint.session_id)

    def resume(self, request: Request) -> None:
        """Note that a call runs: it has locked what it needs of its prefix."""
        if request.agent_hint is not None:
            self.cache.end_pause(request.agent_hint.session_id)

    def pause(self, request: Request, node: TreeNode) -> None:
        """Note that a call has ended. node: the end of its cached tokens."""
        hint: AgentHint | None = request.agent_hint
        if hint is None:
            return
        self.cache.end_pause(hint.session_id)
        if hint.release or request.finish_reason not in ("stop", "length"):
            self.known.pop(hint.session_id, None)
            self.cache.release(node)
            return
        now, conversation = self.now(), self._find(hint.session_id)
        conversation.paused_at = now
        expected = hint.expected_pause
        if expected is None and hint.ttl is None:
            expected = conversation.estimate.expected(self.everyone)
        ttl = PATIENCE * (expected or 0.0) if hint.ttl is None else hint.ttl
        returns_at = math.inf if expected is None else now + expected
        self.cache.protect(hint.session_id, node, returns_at, now + ttl)

    def _find(self, session_id: str) -> Conversation:
        found = self.known.setdefault(session_id, Conversation())
        self.known.move_to_end(session_id)
        if len(self.known) > MOST_CONVERSATIONS:
            oldest, _ = self.known.popitem(last=False)
            self.cache.end_pause(oldest)
        return found
