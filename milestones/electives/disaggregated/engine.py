"""`EngineCore`: a prefill side and a decode side, each with its own steps, pool and radix tree.

    prefill side   | prompt A ........ | prompt B ........ |      chunks of prompts, nothing else
                      | pages of A, layer by layer |
    decode side    | X Y | X Y | X Y | X Y | A X Y | A X Y |      one token of each request

`EngineCore` is the decode side. It takes all requests. It also holds the other side, because here
both live in one process. All that passes between them is a message of the transport, or a page.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

from common import EngineConfig, EngineStats, FinishReason, Request
from common.engine_core import EngineCoreOutput, ForwardError, SampledToken

from .counters import with_counters_of
from .decode import DecodeScheduler
from .lease import Leases
from .m5_engine import EngineCore as M5EngineCore
from .m5_engine import LLMEngine as M5LLMEngine
from .prefill import PrefillScheduler
from .receiver import Receiver
from .schedule_batch import ScheduleBatch
from .transport import (
    Abort,
    Alive,
    Bootstrap,
    End,
    Heartbeat,
    Message,
    Pages,
    Transport,
    layout_of,
)

if TYPE_CHECKING:
    from .model_runner import ModelRunner, PrefillRunner, StepResult
    from .stream import Event

INCARNATIONS = count(1)


class PrefillCore(M5EngineCore):
    """Computes prompts. It hears of requests, and answers, by messages only."""

    scheduler: PrefillScheduler
    runner: PrefillRunner  # type: ignore[assignment] # m5 knows one class of runners

    def __init__(self, config: EngineConfig, runner: PrefillRunner, transport: Transport) -> None:
        super().__init__(config, runner)  # type: ignore[arg-type]
        self.scheduler = PrefillScheduler(config, runner.kv_pool.num_pages)
        self.transport = transport
        runner.windows = transport.windows
        self.layout = layout_of(config)
        self.leases = Leases()
        self.now: Callable[[], float] = time.monotonic
        self.incarnation = next(INCARNATIONS)
        self.sent: Event | None = None  # set when the pages of the newest computed step are sent
        self.ending: deque[tuple[End, Event | None]] = deque()  # and when each may be confirmed

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.scheduler.waiting or self.scheduler.running or self.ending)

    def step(self) -> list[EngineCoreOutput]:
        """Compute prompts. The first token of a prompt follows its last page, after this step."""
        self.receive()
        self.finish_sends()
        for output in super().step():
            attempt = self.scheduler.attempts[output.request]
            sampled = output.new_tokens[0] if output.new_tokens else (None, None)
            self.ending.append((End.of(attempt, output.request, sampled), self.sent))
        return []

    def receive(self) -> None:
        """Process the messages that have arrived, and stop what the other side has forgotten."""
        for message in self.transport.receive("prefill"):
            self.take(message)
        for attempt in self.leases.expired(self.now()):
            self.stop(attempt, "the lease of its pages has expired")

    def take(self, message: Message) -> None:
        """Process one message."""
        if isinstance(message, Bootstrap):
            if message.layout != self.layout:
                error = f"the pages have the layout {self.layout}, not {message.layout}"
                self.transport.send("decode", End(message.attempt, error=error))
                return
            self.leases.grant(message.attempt, self.now())
            self.scheduler.bootstrap(message)
        elif isinstance(message, Pages):
            self.scheduler.start(message)
        elif isinstance(message, Abort):
            self.stop(message.attempt, "it was aborted")
        elif isinstance(message, Heartbeat):
            self.leases.renew(message.attempts, self.now())
            self.transport.send("decode", Alive(self.incarnation))

    def stop(self, attempt: int, error: str) -> None:
        """End an attempt in any queue. Confirm it when none of its pages is being written.

        If it has been computed, its last pages may not be sent any more: that end is dropped.
        """
        self.transport.windows.close(attempt)
        self.ending = deque(item for item in self.ending if item[0].attempt != attempt)
        self.leases.end(attempt)
        self.scheduler.end(attempt)
        self.ending.append((End(attempt, error=error), self.runner.mark_sends()))

    def finish_sends(self) -> None:
        """Wait for the pages of attempts that end, and confirm it. Free their rows.

        Meanwhile, the device computes the next step.
        """
        while self.ending:
            end, sent = self.ending[0]
            try:
                if sent is not None:
                    sent.wait()
            except Exception as error:
                self.fail_sends(f"{type(error).__name__}: {error}")
                return
            self.ending.popleft()
            self.leases.end(end.attempt)
            self.scheduler.end(end.attempt)
            self.transport.send("decode", end)

    def fail_sends(self, error: str) -> None:
        """Stop all attempts after a page could not be sent. The other side tries them again."""
        self.undo_steps_in_flight()
        self.runner.end_sends()
        attempts = {*self.scheduler.transfers, *(end.attempt for end, _ in self.ending)}
        self.ending.clear()
        for attempt in sorted(attempts):
            self.stop(attempt, error)

    def wait(self, batch: ScheduleBatch, result: StepResult) -> list[SampledToken]:
        sampled = super().wait(batch, result)
        self.sent = self.runner.settle(result)
        return sampled


class EngineCore(M5EngineCore):
    """The decode side. It sends each request to the prefill side, and takes it back with pages."""

    scheduler: DecodeScheduler
    runner: ModelRunner

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        super().__init__(config, runner)
        self.config = config
        self.now: Callable[[], float] = time.monotonic
        self.transport = self.open_transport()
        self.scheduler = DecodeScheduler(config, runner.kv_pool.num_pages)
        self.receiver = Receiver(self.scheduler, self.transport, layout_of(config))
        self.prefill = self.open_prefill_side()

    def open_transport(self) -> Transport:
        return Transport()

    def open_prefill_side(self) -> PrefillCore:
        return PrefillCore(self.config, self.runner.prefill_runner, self.transport)

    def use_clock(self, now: Callable[[], float]) -> None:
        """Measure leases with this clock."""
        self.now = self.prefill.now = now

    def step(self) -> list[EngineCoreOutput]:
        """Run one step of each side. Return the tokens of both."""
        outputs = self.receiver.send(self.now())
        try:
            outputs += super().step()
            self.run_prefill()
            if not self.result_queue:  # nothing to compute here: wait for pages
                self.prefill.finish_sends()
        except ForwardError as failure:
            failure.outputs = [*outputs, *failure.outputs]
            raise
        outputs += self.receiver.receive()
        self.settle_if_idle()
        return outputs

    def run_prefill(self) -> None:
        """Let the prefill side run a step. Raises `ForwardError` with requests of this side."""
        try:
            self.prefill.step()
        except ForwardError as failure:
            attempts = map(self.prefill.scheduler.attempts.get, failure.requests)
            known = [self.receiver.requests[a] for a in attempts if a in self.receiver.requests]
            raise ForwardError(known, failure.error) from failure

    def settle(self) -> None:
        """Let the prefill side end attempts that no request needs any more, if it has any."""
        if self.scheduler.stand_ins or self.prefill.scheduler.transfers:
            self.receiver.ask(self.now())  # a side that has restarted knows none of them
            self.prefill.step()
            self.prefill.finish_sends()
            self.receiver.receive()

    def finish(self, request: Request, reason: FinishReason) -> None:
        if not request.is_finished:
            self.receiver.forget(request)
        super().finish(request, reason)
        self.settle_if_idle()

    def settle_if_idle(self) -> None:
        """End what is left of attempts if no request is: no step may follow."""
        if not self.scheduler.waiting and not self.scheduler.with_rows:
            self.settle()

    def send_back(self) -> None:
        """Let all requests wait again. They keep their tokens, and lose their memory."""
        for request in self.scheduler.transfer_queue[::-1]:
            self.receiver.drop(request)
        self.scheduler.join_running()
        super().send_back()

    def reset_prefix_cache(self) -> int:
        """Free the cached pages of both sides. Return the number of those of the decode side."""
        self.prefill.reset_prefix_cache()
        return super().reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Return the counters of both sides together. Pages are those of the decode side."""
        return with_counters_of(super().stats(), self.prefill.stats())

    def check_invariants(self) -> None:
        super().check_invariants()
        self.prefill.check_invariants()
        self.receiver.check_invariants()

    def close(self) -> None:
        self.settle()
        self.prefill.close()
        super().close()


class LLMEngine(M5LLMEngine):
    """Runs requests until they finish. Each `step` is one of each side."""

    core: EngineCore

    def make_core(self) -> EngineCore:
        from .model_runner import ModelRunner  # not above: a core needs no model

        core = EngineCore(self.config, ModelRunner(self.loaded.model, self.config))
        core.use_clock(self.now)
        return core

    def queued_requests(self) -> list[Request]:
        scheduler = self.core.scheduler
        return [*scheduler.waiting, *scheduler.with_rows, *self.search.held]
