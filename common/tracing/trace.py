"""`Trace`: records what an engine does in each step, from the outside. Engines have no code for it.

    with Trace(engine) as trace:
        while engine.has_unfinished_requests():
            engine.step()
    trace.data              # see `TraceData`

It wraps the main methods of one engine instance in timers, and removes all of them at the end, no
matter how the run ended. The result has two lanes:

    CPU       | step: schedule | run                  | process |   | step: ...
    forward                     | the model computes |
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..engine_core import ForwardError
from ..llm_engine import LLMEngine
from ..request import Request
from .data import Frame, FrameDecision, Span, TraceData
from .decisions import Decision, watch, wrap
from .forwards import Forwards, HookedForwards, StreamForwards
from .frames import Observer

if TYPE_CHECKING:
    from typing_extensions import Self

TIMED = ("launch", "wait")  # methods of the core that are wrapped if it has them
TREE_METHODS = ("match_prefix", "insert", "lock", "unlock", "evict")  # those that change the tree


class Trace:
    """Records while it is open. `data` is complete when the trace is closed.

    The time that recording itself takes is in the CPU lane too, as spans named `trace`.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine: Any = engine
        self.data = TraceData(describe(engine), origin=self.engine.now())
        self._step = 0
        self._in_step = False
        self._batches: list[dict[int, int]] = []  # of this step
        self._decisions: list[FrameDecision] = []  # of this step
        self._failure: str | None = None  # the exception of the step or of its forward
        self._scheduled: deque[int] = deque()  # the steps of batches that have no forward yet
        self._schedule_ended = 0.0

    def __enter__(self) -> Self:
        self._observer = Observer(self.engine)
        self.data.requests = self._observer.requests
        self.data.origin = now = self.engine.now()
        self.data.frames.append(self._observer.look(Frame(0, now, now)))
        with ExitStack() as undo:  # if anything fails here, all wrappers are removed
            self._forwards = self._watch_forwards(undo)
            engine = self.engine
            wrap(undo, engine.output_processor, "add_request", self._around_add_request)
            wrap(undo, engine.core.scheduler, "schedule", self._around_schedule)
            watch(engine.core, self._note, undo)
            if hasattr(engine.core, "undo_steps_in_flight"):
                wrap(undo, engine.core, "undo_steps_in_flight", self._around_undo)
            wrap(undo, engine, "find_cause", self._around_find_cause)
            for name in TIMED:
                if hasattr(engine.core, name):
                    wrap(undo, engine.core, name, functools.partial(self._timed, name))
            wrap(undo, engine.core.scheduler, "update_from_output", self._around_update)
            wrap(undo, engine, "process", functools.partial(self._timed, "process"))
            for name in TREE_METHODS:
                if hasattr(self._observer.radix_cache, name):
                    tree = self._observer.radix_cache
                    wrap(undo, tree, name, self._around_tree_method)
            wrap(undo, engine, "step", self._around_step)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        self._take_forwards()
        now = self.engine.now()
        last = self._observer.look(Frame(self._step + 1, now, now))
        if last.requests or last.pages or last.nodes:  # requests were aborted after the last step
            self.data.frames.append(last)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = self.engine.now()
            try:
                return method(*args, **kwargs)
            finally:
                self._add_span(name, started)

        return timed

    def _around_add_request(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def add_request(request: Request) -> None:
            method(request)
            self._observer.add_request(request)

        return add_request

    def _around_schedule(self, method: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed("schedule", method)

        def schedule(*args: Any, **kwargs: Any) -> Any:
            scheduled = timed(*args, **kwargs)
            self._schedule_ended = self.engine.now()
            if batch := self._observer.batch(scheduled):
                self._batches.append(batch)
                self._scheduled.append(self._step)
            return scheduled

        return schedule

    def _note(self, decision: Decision) -> None:
        request = decision.request
        number = None if request is None else self._observer.number(request)
        self._decisions.append(
            FrameDecision(decision.kind, number, decision.count, decision.reason)
        )

    def _around_tree_method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Note that the tree changed, so that frames of other steps need not look at it."""

        def tree_method(*args: Any, **kwargs: Any) -> Any:
            self._observer.tree_changed = True
            return method(*args, **kwargs)

        return tree_method

    def _around_undo(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Forget the batches in flight: the times of their forwards may never be reported."""

        def undo_steps_in_flight() -> None:
            method()
            self._take_forwards()
            self._scheduled.clear()

        return undo_steps_in_flight

    def _around_update(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Time the first part of `process`; in an engine without overlap, what was before it too.

        From the end of `schedule` on, such an engine runs the forward and waits for it.
        """
        timed = self._timed("process", method)

        def update(*args: Any, **kwargs: Any) -> Any:
            if not hasattr(self.engine.core, "launch"):
                self._add_span("run", self._schedule_ended)
            return timed(*args, **kwargs)

        return update

    def _around_find_cause(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Record the failure of a forward. The step continues without its tokens."""

        def find_cause(failure: ForwardError) -> None:
            self._failure = type(failure.error).__name__
            method(failure)

        return find_cause

    def _around_step(self, method: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed("step", method)

        def step(*args: Any, **kwargs: Any) -> Any:
            self._step += 1
            self._in_step = True
            self._batches, self._decisions, self._failure = [], [], None
            started = self.engine.now()
            try:
                return timed(*args, **kwargs)
            except BaseException as error:
                self._failure = type(error).__name__
                raise
            finally:
                self._in_step = False
                self._after_step(started)

        return step

    def _after_step(self, started: float) -> None:
        ended = self.engine.now()
        self._take_forwards()
        if self._failure is not None:
            self._scheduled.clear()  # a batch may have failed before its forward began
        frame = Frame(
            self._step, started, ended, self._batches, self._decisions, error=self._failure
        )
        self.data.frames.append(self._observer.look(frame))
        self._add_span("trace", ended)

    def _add_span(self, name: str, started: float) -> None:
        self.data.spans.append(Span(name, started, self.engine.now(), self._step))

    def _watch_forwards(self, undo: ExitStack) -> Forwards:
        runner = self.engine.core.runner
        spans = getattr(getattr(runner, "stream", None), "spans", None)
        if spans is not None:
            return StreamForwards(spans)
        return HookedForwards(runner.model, lambda: self._in_step, undo, self.engine.clock)

    def _take_forwards(self) -> None:
        """Assign each new forward to its step.

        Forwards run in the order of their batches, perhaps one step later.
        """
        for start, end in self._forwards.take():
            step = self._scheduled.popleft() if self._scheduled else self._step
            self.data.forwards.append(Span("forward", start, end, step))


def describe(engine: Any) -> dict[str, Any]:
    """Return the constant properties of an engine: milestone, model, configuration and memory."""
    kv_cache = getattr(engine.core.scheduler, "kv_cache", None)
    meta = {
        "engine": type(engine.core.scheduler).__module__.split(".")[-2],
        "model": engine.loaded.name,
        "device": str(engine.loaded.model.device),
        "config": dict(vars(engine.config)),
        "emulated_forward_ms": getattr(engine.config, "emulated_forward_ms", None) or None,
        "step_costs": engine.clock.words if engine.clock.is_virtual else None,
        "has_tree": hasattr(kv_cache, "radix_cache"),
        "overlaps": hasattr(engine.core, "launch"),
    }
    if (allocator := getattr(kv_cache, "allocator", None)) is not None:
        meta |= {"num_pages": allocator.num_pages, "page_size": engine.config.page_size}
    elif kv_cache is not None:
        meta |= {"num_rows": kv_cache.num_rows, "row_tokens": kv_cache.row_tokens}
    return meta
