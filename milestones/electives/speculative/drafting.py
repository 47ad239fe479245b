"""`Drafting`: which requests of a step verify drafts, and how many. Plain Python data, no tensors.

Drafts come last: they get the tokens of the step's budget and the free pages that nothing else
needs, and evict no cached page.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from common import EngineConfig, Request
from common.engine_core import EngineCoreOutput, SampledToken, append_token
from common.outputs import StepCounters

from .drafter import Drafter
from .kv_cache import KVCacheManager
from .schedule_batch import ScheduleBatch

logger = logging.getLogger(__name__)

NUM_DRAFTS = 4  # of a request in one step, at most; vLLM: num_speculative_tokens
MOST_REQUESTS = 8  # with more, a step computes so many tokens that drafts make it slower


class Drafting:
    """Asks the drafter, and reserves the memory of what may be accepted."""

    def __init__(
        self, config: EngineConfig, kv_cache: KVCacheManager, counters: StepCounters
    ) -> None:
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.kv_cache = kv_cache
        self.drafter: Drafter | None = None  # the engine sets it; without it, no step has drafts
        self.counters = counters
        self.has_failed = False  # at least once, which is logged
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def is_active(self, running: list[Request]) -> bool:
        """Return whether the requests of the next step may verify drafts."""
        return self.drafter is not None and len(running) <= MOST_REQUESTS

    def extend(self, batch: ScheduleBatch, num_decodes: int) -> None:
        """Add drafts to the decodes of a batch, which are its first `num_decodes` requests."""
        assert self.drafter is not None, "is_active() comes first"
        for request in batch.requests[:num_decodes]:
            most = min(NUM_DRAFTS, self._room(request))
            most = min(most, self.max_num_batched_tokens - batch.num_tokens)
            # The last token of a request is sampled, and never an input.
            most = min(most, request.max_num_tokens - request.num_tokens - 1)
            if most <= 0 or request.num_output_tokens == 0:
                continue
            if request.params.is_adjusted:  # a penalty counts the tokens before it, not drafts
                continue
            if drafts := self._propose(self.drafter, request, most):
                num_tokens = request.num_computed_tokens + 1 + len(drafts)
                self.kv_cache.allocate_slots(request, num_tokens)
                batch.add_drafts(request, drafts, num_decodes)

    def count(self, batch: ScheduleBatch) -> None:
        """Count all drafts of a step as padding. `accept` takes the right ones out again."""
        num_drafts = sum(map(len, batch.drafts.values()))
        self.num_draft_tokens += num_drafts
        self.counters.decode_tokens -= num_drafts  # m5 counts all tokens of a decode
        self.counters.padding_tokens += num_drafts

    def verify(
        self, output: EngineCoreOutput, drafts: list[int], sampled: list[SampledToken]
    ) -> EngineCoreOutput:
        """Append the model's own tokens, up to the first one that differs from its draft.

        output: with the first token, `sampled[0]`, which the request has got already.

        I1, I2: `sampled[i]` is what the model draws after the first i drafts. If these are its own
        tokens, it is the token that a step without drafts would draw at this position.
        """
        request, new_tokens = output.request, [*output.new_tokens]
        for draft, token in zip(drafts, sampled[1:], strict=True):
            if request.is_finished or request.token_ids[-1] != draft:
                break
            self.accept(request)
            output = append_token(request, token)
            new_tokens += output.new_tokens
        return replace(output, new_tokens=new_tokens)

    def accept(self, request: Request) -> None:
        """Count the next draft of a request as computed: the model's own token is equal."""
        request.num_computed_tokens += 1
        self.counters.decode_tokens += 1
        self.counters.padding_tokens -= 1
        self.num_accepted_tokens += 1

    def free_refused(self, batch: ScheduleBatch) -> None:
        """Give back the pages of drafts that were not accepted (I3)."""
        for request in batch.drafts:
            if not request.is_finished:
                self.kv_cache.free_slots(request, request.num_computed_tokens)

    def _propose(self, drafter: Drafter, request: Request, most: int) -> list[int]:
        """Return the drafts of a request. If the drafter fails, there are none."""
        try:
            return drafter.propose(request, most)
        except (AssertionError, NotImplementedError):  # the code is wrong, or not written yet
            raise
        except Exception:
            if not self.has_failed:
                logger.warning("the drafter failed; this is logged once", exc_info=True)
            self.has_failed = True
            return []

    def _room(self, request: Request) -> int:
        """Return how many drafts fit into the request's own pages and free pages."""
        free = len(self.kv_cache.allocator.free_pages)
        slots = (len(self.kv_cache.pages_of(request)) + free) * self.kv_cache.page_size
        return slots - request.num_computed_tokens - 1
