"""`Scheduler`: a request with a grammar waits in another queue first, until it is compiled."""

from __future__ import annotations

from dataclasses import replace

from common import EngineConfig, EngineStats, FinishReason, Request
from common.engine_core import EngineCoreOutput, SampledToken

from .grammar_manager import GrammarManager
from .m5_scheduler import Scheduler as M5Scheduler
from .schedule_batch import ScheduleBatch


class Scheduler(M5Scheduler):
    """A live request is in the queue of grammars, or in the waiting queue, or in `running`."""

    def __init__(
        self, config: EngineConfig, num_pages: int, grammars: GrammarManager | None = None
    ) -> None:
        """grammars: None for requests without grammars, as in m5."""
        super().__init__(config, num_pages)
        self.grammars = grammars or GrammarManager()
        self.delays_sampling = True  # False: wait for step N before N+1 is launched

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.params.structured_outputs is not None:
            self.waiting.remove(request)
            self.policy.on_removal(request)
            self.grammars.add_request(request)

    def enqueue(self, request: Request) -> None:
        """Append a request to the waiting queue. Its grammar is compiled."""
        self.policy.on_arrival(request, len(self.waiting))
        self.waiting.append(request)

    def needs_result(self) -> bool:
        """Return whether the next step must not be planned before the step in flight completes.

        Measurements add a reason to those of m5: `delays_sampling` is False.
        """
        if not self.delays_sampling and self.grammars.grammars:
            return True
        return super().needs_result()

    def update_from_output(
        self, batch: ScheduleBatch, sampled: list[SampledToken]
    ) -> list[EngineCoreOutput]:
        """Complete a computed batch. Its tokens join the grammars first, and then their requests.

        A token that the grammar does not allow ends its request with an error.
        """
        errors = dict[Request, str]()
        for i, request in enumerate(batch.sampled_requests):
            if request.is_finished:
                continue
            if (error := self.grammars.accept(request, sampled[i][0])) is not None:
                errors[request], sampled[i] = error, (None, None)
        outputs = super().update_from_output(batch, sampled)
        return [replace(o, error=errors.get(o.request, o.error)) for o in outputs]

    def finish_request(self, request: Request, reason: FinishReason) -> None:
        if self.grammars.remove(request):  # it was still in the queue of grammars
            request.finish_reason = reason
        else:
            super().finish_request(request, reason)

    def make_stats(self) -> EngineStats:
        stats = super().make_stats()
        return replace(stats, num_waiting=stats.num_waiting + len(self.grammars.queue))

    def check_invariants(self) -> None:
        super().check_invariants()
        has_ended = [request for request in self.grammars.grammars if request.is_finished]
        assert not has_ended, f"I3: {has_ended} have ended, and have a grammar"
        queued = {*self.waiting, *self.running}
        assert not self.grammars.queue.keys() & queued, "I3: a request waits in two queues"
