"""`EngineCore`: the loop of m5, but whole plans are launched, and none while a step is in flight.

    step():  launch a plan      if no step is in flight: choose requests, queue several forwards
             wait for step N    the oldest one
             update step N      tokens join their requests; finished requests leave

    host      | launch 1, 2, 3 | wait 1 | update 1 | wait 2 | update 2 | ... | launch 4, 5, 6 |
    forward             | 1 ............| 2 ..............| 3 ..........|              | 4 ....

Between two plans, the model computes nothing.
"""

from __future__ import annotations

from common.engine_core import EngineCoreOutput

from .m5_engine import EngineCore as M5EngineCore
from .m5_engine import LLMEngine as M5LLMEngine


class EngineCore(M5EngineCore):
    """Decides once per plan what is computed."""

    def step(self) -> list[EngineCoreOutput]:
        """Return the tokens of one step. The forwards of a whole plan are queued at once.

        If a forward fails, all steps in flight are undone, and the requests are as before them.
        """
        if not self.result_queue:
            self.launch_plan()  # the lesson: decide once per plan, and not once per step
        if not self.result_queue:
            return []
        batch, result = self.result_queue[0]
        self.scheduler.in_flight.advance(batch)
        sampled = self.wait(batch, result)
        self.result_queue.popleft()
        outputs = self.scheduler.update_from_output(batch, sampled)
        self.undo_useless_step()
        return outputs

    def launch_plan(self) -> None:
        """Plan several steps and queue their forwards, each one after the one before."""
        self.launch()
        while self.scheduler.goes_on():
            self.launch()
        self.scheduler.in_flight.retreat()

    def undo_useless_step(self) -> None:
        """If all requests of the steps in flight have finished, undo these steps.

        Their forwards are queued already, so their tokens are computed all the same.
        """
        left = [request for batch, _result in self.result_queue for request in batch.requests]
        if left and all(request.is_finished for request in left):
            self.scheduler.counters.padding_tokens += len(left)
            self.undo_steps_in_flight()


class LLMEngine(M5LLMEngine):
    """Runs requests until they finish, one `step` at a time, several steps per plan."""

    def make_core(self) -> EngineCore:
        from .model_runner import ModelRunner  # not above: a core needs no model

        return EngineCore(self.config, ModelRunner(self.loaded.model, self.config))
