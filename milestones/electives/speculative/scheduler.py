"""`Scheduler`: a step verifies drafts if few requests run, and may give a request several tokens.

Drafts come last: they take only the tokens and pages that nothing else needs.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from common import EngineConfig, EngineStats
from common.engine_core import EngineCoreOutput, SampledToken

from .drafting import Drafting
from .m5_scheduler import Scheduler as M5Scheduler
from .schedule_batch import ScheduleBatch


class Scheduler(M5Scheduler):
    """Adds drafts to a step when the results of all steps before it are known."""

    def __init__(self, config: EngineConfig, num_pages: int) -> None:
        super().__init__(config, num_pages)
        self.drafting = Drafting(config, self.kv_cache, self.counters)

    def needs_result(self) -> bool:
        """Return whether the next step must not be planned before the step in flight completes.

        One reason more than in m5: the next step may verify drafts. A drafter needs all tokens, and
        how many drafts are accepted is not known before the step has ended.
        """
        return self.drafting.is_active(self.running) or super().needs_result()

    def update_from_output(
        self, batch: ScheduleBatch, sampled: list[SampledToken]
    ) -> list[EngineCoreOutput]:
        self.drafting.count(batch)
        tokens = iter(sampled)
        own = {r: [*islice(tokens, 1 + len(batch.drafts_of(r)))] for r in batch.sampled_requests}
        # m5 appends the first token of each request, which no draft stands before.
        outputs = super().update_from_output(batch, [first for first, *_ in own.values()])
        for i, output in enumerate(outputs):
            request = output.request
            if output.finish_reason is None:
                drafts = batch.drafts_of(request)
                outputs[i] = output = self.drafting.verify(output, drafts, own[request])
                if output.finish_reason is not None:
                    self.finish_request(request, output.finish_reason)
        self.drafting.free_refused(batch)
        return outputs

    def make_stats(self) -> EngineStats:
        return replace(
            super().make_stats(),
            num_draft_tokens=self.drafting.num_draft_tokens,
            num_accepted_tokens=self.drafting.num_accepted_tokens,
        )

    def _admit_waiting(self, batch: ScheduleBatch) -> None:
        """Let waiting requests run, and then add drafts to the decodes of the running ones."""
        num_decodes = sum(request.num_uncomputed_tokens == 1 for request in batch.requests)
        super()._admit_waiting(batch)
        if self.drafting.is_active(self.running) and not self.in_flight.batches:
            self.drafting.extend(batch, num_decodes)
