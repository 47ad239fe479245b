"""`Scheduler`: decodes may verify drafts, and then get several tokens in one step.

The tokens before a draft must be known. So a step with drafts is planned when no step is in flight.
"""

from __future__ import annotations

from itertools import islice

from common import EngineConfig
from common.engine_core import EngineCoreOutput, SampledToken

from .drafter import Drafter
from .drafting import Drafting
from .m5_scheduler import Scheduler as M5Scheduler
from .schedule_batch import ScheduleBatch


class Scheduler(M5Scheduler):
    """Drafts get the tokens and the pages that nothing else in the step needs."""

    def __init__(
        self, config: EngineConfig, num_pages: int, drafter: Drafter | None = None
    ) -> None:
        """drafter: None for steps without drafts, as in m5."""
        super().__init__(config, num_pages)
        self.drafting = Drafting(config, self.kv_cache, drafter, self.counters)

    def needs_result(self) -> bool:
        """Return whether the next step must not be planned before the step in flight completes.

        Beside the reasons of m5, the next step may verify drafts: a drafter needs all tokens, and
        how many drafts are accepted is not known before the step has ended.
        """
        return self.may_draft() or super().needs_result()

    def may_draft(self) -> bool:
        """Return whether the next step may verify drafts."""
        return self.drafting.is_active(self.running)

    def update_from_output(
        self, batch: ScheduleBatch, sampled: list[SampledToken]
    ) -> list[EngineCoreOutput]:
        """Complete a computed batch, append the tokens that its drafts agree with, and count.

        sampled: for each request, a token behind its newest token and behind each of its drafts.
        """
        self.in_flight.complete(batch)
        self.counters.num_steps += 1
        of_prompts = of_finished = num_known = 0
        for request, num_tokens in batch.advances():
            before = request.num_computed_tokens - num_tokens
            num_known += num_tokens
            if request.is_finished:
                of_finished += num_tokens
            elif before < request.num_prompt_tokens:
                of_prompts += min(num_tokens, request.num_prompt_tokens - before)
                self.kv_cache.insert(request)  # from here on, other requests can match these pages
        num_drafts = batch.num_tokens - num_known
        self.counters.prefill_tokens += of_prompts
        self.counters.decode_tokens += num_known - of_finished - of_prompts
        self.counters.padding_tokens += of_finished + num_drafts  # `accept` takes drafts out again
        self.drafting.num_draft_tokens += num_drafts
        outputs, tokens = list[EngineCoreOutput](), iter(sampled)
        for request in batch.sampled_requests:
            drafts = batch.drafts.get(request, [])
            own = list(islice(tokens, 1 + len(drafts)))
            if request.is_finished:
                continue
            outputs.append(output := self.drafting.verify(request, drafts, own))
            if output.finish_reason is not None:
                self.finish_request(request, output.finish_reason)
        self.drafting.free_refused(batch)
        return outputs

    def _admit_waiting(self, batch: ScheduleBatch) -> None:
        num_decodes = sum(request.num_uncomputed_tokens == 1 for request in batch.requests)
        super()._admit_waiting(batch)
        if self.may_draft() and not self.in_flight.batches:
            self.drafting.extend(batch, num_decodes)
