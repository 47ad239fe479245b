"""`use_virtual_time`: let an engine run in virtual time. Engines have no code for it.

    engine = LLMEngine(config)
    clock = use_virtual_time(engine)    # before the first request
    ...
    clock.now()                         # virtual seconds; `engine.clock` is this clock

Nothing here decides when work runs. The end of a forward is a number, to which the clock of the
host goes on when the host waits for it.

An elective does work that the milestones do not have, such as copies of pages. Its `virtual_costs`
module says what this work takes, because without a price every technique would win.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import deque
from collections.abc import Callable
from typing import Any

from .clock import StepCosts, VirtualClock, Work

SPANS_KEPT = 4096


class VirtualEvent:
    """The event of a stream, and the time when its work ends."""

    def __init__(self, stream: VirtualStream, event: Any, work: Work) -> None:
        self.stream, self.event, self.work = stream, event, work

    def wait(self) -> None:
        """Wait as the event does. Raises what the work raised."""
        try:
            self.event.wait()
        finally:
            if self.stream.clock.work is None:
                self.stream.ended(self.work)
            else:  # the work of another stream waits
                self.stream.clock.wait_until(self.work.end)


class VirtualStream:
    """A forward stream in virtual time: the work of a real one, which begins when the last ended.

    When the real work runs does not matter: early, late, or in another thread.
    """

    def __init__(self, stream: Any, model: Any, clock: VirtualClock) -> None:
        self.stream, self.model, self.clock = stream, model, clock
        self.spans: deque[tuple[float, float]] = deque(maxlen=SPANS_KEPT)
        self.free_at = 0.0  # when all work that has run has ended
        self.pending: deque[Work] = deque()  # launched, and not yet waited for

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def launch(self, run: Callable[[], None], *options: Any, **more: Any) -> VirtualEvent:
        work = Work(self.clock.now())
        self.pending.append(work)
        event = self.stream.launch(lambda: self._run(run, work), *options, **more)
        return VirtualEvent(self, event, work)

    def _run(self, run: Callable[[], None], work: Work) -> None:
        work.begin = max(work.begin, self.free_at)
        try:
            with self.clock.computing(self.model, work):
                run()
        finally:
            self.free_at = work.end

    def ended(self, work: Work) -> None:
        """Let the host know that work has ended, and all work before it."""
        while work in self.pending:
            done = self.pending.popleft()
            if done.num_forwards:
                self.spans.append((done.begin, done.end))
        self.clock.wait_until(work.end)

    def synchronize(self) -> None:
        self.stream.synchronize()
        if self.pending:
            self.ended(self.pending[-1])


def use_virtual_time(engine: Any, costs: StepCosts | None = None) -> VirtualClock:
    """Let an idle engine run in virtual time from now on. Return its clock.

    The host's time of a step is charged in three parts: a quarter when the step is scheduled, a
    half when it is prepared, and a quarter when its result is processed. A call of the model is
    charged with the shape of its input.
    """
    clock = engine.clock = VirtualClock(costs or StepCosts())
    core = engine.core
    charge_steps(core, clock)
    costs_module = type(core).__module__.rpartition(".")[0] + ".virtual_costs"
    if importlib.util.find_spec(costs_module) is not None:
        clock.words += importlib.import_module(costs_module).add_costs(engine, clock)
    return clock


def charge_steps(core: Any, clock: VirtualClock) -> None:
    """Let the steps of a core take time on a clock."""
    runner = core.runner

    def host_works(batch: Any, part: float) -> None:
        if batch.requests:
            clock.charge(part * clock.costs.host_seconds(len(batch.requests)))

    def schedule(original: Callable[..., Any], *args: Any) -> Any:
        batch = original(*args)
        host_works(batch, 1 / 4)
        return batch

    def run(original: Callable[..., Any], batch: Any, *args: Any) -> Any:
        host_works(batch, 1 / 2)
        with clock.computing(runner.model):
            return original(batch, *args)

    def launch(original: Callable[..., Any], batch: Any, *args: Any) -> Any:
        host_works(batch, 1 / 2)
        return original(batch, *args)

    def replay(original: Callable[..., Any], inputs: Any) -> Any:
        before = runner.graphs.num_replays
        logits = original(inputs)
        if runner.graphs.num_replays > before:  # a replay does not call the model
            clock.forward_ended(inputs.input_ids)
        return logits

    def update(original: Callable[..., Any], batch: Any, *args: Any) -> Any:
        host_works(batch, 1 / 4)
        return original(batch, *args)

    wrap(core.scheduler, "schedule", schedule)
    wrap(core.scheduler, "update_from_output", update)
    if hasattr(runner, "stream"):
        for name, stream in list(vars(runner).items()):
            if hasattr(stream, "enqueuing"):  # an elective has more than one stream
                setattr(runner, name, VirtualStream(stream, runner.model, clock))
        wrap(runner, "launch", launch)
        wrap(runner.graphs, "run", replay)
    else:
        wrap(runner, "run", run)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method of one object by `around(method, *args)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args: around(original, *args))
