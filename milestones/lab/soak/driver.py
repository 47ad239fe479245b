"""`Driver`: runs one plan on one engine, and checks all promises of the engine."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from common import RequestOutput

from ...chain import at_least
from ..instruments.audit import assert_idle, audit
from . import subject
from .answers import Source
from .checker import Checker, Progress
from .extras import Preparation
from .faults import MESSAGE, Faults
from .interrupts import Interrupter
from .plan import Arrival, Plan, PlannedRequest
from .results import SoakError, Tally

Value = TypeVar("Value")


class Driver:
    """One schedule. `run` raises `SoakError` at the first broken promise."""

    def __init__(
        self, milestone: str, mode: str, plan: Plan, source: Source,
        tally: Tally, interrupter: Interrupter,
    ) -> None:  # fmt: skip
        self.milestone = milestone
        self.plan = plan
        self.source = source
        self.tally = tally
        self.interrupter = interrupter
        overlaps = at_least(milestone, "m5_overlap")
        interrupter.can_count_calls = mode not in ("overlap", "serial") or not overlaps
        self.num_threads = threading.active_count()
        self.chance = random.Random(f"{plan.seed}/{plan.number}/interrupts")
        self.faults = Faults(plan)
        self.checker = Checker(source, tally, plan.may_fail)
        self.engine = subject.build_engine(milestone, mode, plan, source.loaded)
        self.limits = subject.Limits(milestone, self.engine)
        self.progress = Progress(self.engine)
        self._watch_steps()
        self.streams: dict[str, Iterator[RequestOutput]] = {}
        self.num_outputs: dict[str, int] = {}  # of each stream
        self.aborts: list[tuple[int, str]] = []  # (tick, request id)
        self.preparation = Preparation(self.engine, waits=not plan.interrupt_chance)
        self.has_died = False

    def run(self) -> None:
        """Run the plan to its end, close the engine, and check that nothing is left."""
        try:
            with self.faults.on(self.engine, self.milestone):
                self._run_plan()
            self._check_idle()
        except Exception as error:
            if str(error) != MESSAGE or not self.plan.may_die:
                raise
            subject.check_dead(self.engine)
            self.has_died = True
        finally:
            self.engine.close()
            self.tally.failures += self.faults.num_injected
            self.tally.steps += self.progress.num_steps
        if threading.active_count() > self.num_threads:
            raise SoakError("wrong", f"I3: a thread still runs: {threading.enumerate()}")

    @property
    def outcome(self) -> str:
        """What the failure of a part did, in one word; "" if the plan did not reach the part."""
        if self.faults.num_part_faults == 0:
            return ""
        return "dead" if self.has_died else "ends" if self.checker.failed else "again"

    def _watch_steps(self) -> None:
        """Check progress after each step, also after the steps of `generate` and `stream`."""
        audited_step = self.engine.step

        def watched_step() -> list[RequestOutput]:
            outputs: list[RequestOutput] = audited_step()
            self.progress.check(outputs)
            return outputs

        self.engine.step = watched_step

    def _run_plan(self) -> None:
        self._run_arrivals(self.plan.arrivals)
        self.faults.is_over = True
        self._run_arrivals(self.plan.afterwards)

    def _run_arrivals(self, arrivals: list[Arrival]) -> None:
        to_come, tick = list(arrivals), 0
        while to_come or self.streams or self.engine.has_unfinished_requests():
            while to_come and to_come[0].tick <= tick:
                self._arrive(to_come.pop(0), tick)
            for when, name in [a for a in self.aborts if a[0] <= tick]:
                self.aborts.remove((when, name))
                self._abort(name)
            if self.plan.reset_every and tick % self.plan.reset_every == 0:
                self._call(self.engine.reset_prefix_cache)
            # If interrupts came before each step so far, the engine has no thread yet.
            if tick == self.plan.stranger_at and self.engine.caller.thread is not None:
                self._must_refuse(
                    lambda: subject.call_from_another_thread(self.engine), RuntimeError
                )
            for name in list(self.streams):
                self._follow(name)
            outputs, hit = self._call(self.engine.step)
            if hit:
                audit(self.engine)
            self._take(outputs or [])
            self._check_held()
            tick += 1

    def _call(self, function: Callable[[], Value]) -> tuple[Value | None, bool]:
        """Call the engine, sometimes with an interrupt. Return the value, and whether it hit."""
        if self.plan.interrupt_chance and self.chance.random() < self.plan.interrupt_chance:
            return self.interrupter.call(self.chance, function)
        return function(), False

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.checker.take(output)

    def _arrive(self, arrival: Arrival, tick: int) -> None:
        if arrival.how == "refused":
            self._refuse(arrival.bad)
        elif not all(self.limits.admits(request) for request in arrival.requests):
            self._must_refuse(lambda: subject.add_too_long(self.engine, arrival))
        elif arrival.how == "generate":
            self._generate(arrival.requests)
        elif arrival.how == "stream":
            self._open_stream(arrival.requests[0])
        else:
            self._add(arrival.requests[0], tick)

    def _expect(self, request_id: str, request: PlannedRequest) -> None:
        self.checker.add(request_id, request, self.limits.most_tokens(request))

    def _add(self, request: PlannedRequest, tick: int) -> None:
        """Add a request. An interrupted call must not have added it, so call again."""
        name, arguments = request.name, request.extra.arguments
        self.preparation.before(request.extra)
        hit = True
        while hit:
            _, hit = self._call(
                lambda: self.engine.add_request(request.prompt, request.asked, name, **arguments)
            )
            if hit and self._held() - self.checker.live.keys():
                raise SoakError("wrong", f"an interrupted add_request added {name}")
        self._expect(name, request)
        if request.fault is not None and request.fault.kind == "text":
            nth = request.fault.position - len(request.prompt) + 1
            self.faults.break_text(self.engine, name, nth)
        if request.abort_after is not None:
            self.aborts.append((tick + request.abort_after, name))

    def _abort(self, name: str) -> None:
        live = self.checker.live.get(name)
        ended, hit = self._call(lambda: self.engine.abort_request(name))
        if hit:  # the interrupted call may or may not have aborted the request
            self.engine.abort_request(name)
        if live is not None:
            live.may_be_aborted, live.must_be_aborted = bool(ended) or hit, bool(ended)
        elif ended:
            raise SoakError("wrong", f"abort_request({name!r}) is True after the request's end")

    def _generate(self, requests: list[PlannedRequest]) -> None:
        """Call `generate`, and check each answer. If interrupted, it must leave no request."""
        for request in requests:
            self.preparation.before(request.extra)
        outputs, hit = self._call(
            lambda: self.engine.generate(
                [r.prompt for r in requests], [r.params for r in requests], progress=False
            )
        )
        if hit or outputs is None:
            return
        if [o.prompt_token_ids for o in outputs] != [r.prompt for r in requests]:
            raise SoakError("lost", "generate returned other prompts than it was given")
        for output, request in zip(outputs, requests, strict=True):
            self._expect(output.request_id, request)
            self.checker.take(output)
            if output.request_id in self.checker.live:
                raise SoakError("lost", f"generate returned before {output.request_id} ended")

    def _open_stream(self, request: PlannedRequest) -> None:
        self.preparation.before(request.extra)
        stream, hit = self._call(lambda: self.engine.stream(request.prompt, request.params))
        if hit or stream is None:
            return
        (name,) = self._held() - self.checker.live.keys()
        self._expect(name, request)
        self.streams[name], self.num_outputs[name] = stream, 0

    def _follow(self, name: str) -> None:
        """Take one output of a stream, and leave the stream if the plan says so."""
        stream = self.streams[name]
        if name not in self.checker.live:  # its last output came from another call
            del self.streams[name]
            return
        leave_after = self.checker.live[name].planned.leave_after
        output, hit = self._call(lambda: next(stream, None))
        if output is not None:
            self.num_outputs[name] += 1
            self.checker.take(output)
        is_left = leave_after is not None and self.num_outputs[name] >= leave_after
        if (hit or is_left) and name in self.checker.live:
            stream.close()  # type: ignore[attr-defined]
            self.checker.forget(name)
            self.tally.aborts += 1
        if name not in self.checker.live:
            del self.streams[name]

    def _refuse(self, bad: int) -> None:
        call = subject.BAD_CALLS[bad % len(subject.BAD_CALLS)]
        in_flight = next(iter(self.checker.live), None)
        if in_flight is None:
            in_flight, call = "", subject.BAD_CALLS[0]
        self._must_refuse(lambda: call(self.engine, in_flight))

    def _must_refuse(self, call: Callable[[], object], error: type[Exception] = ValueError) -> None:
        try:
            call()
        except error:
            self.tally.refusals += 1
        else:
            raise SoakError("wrong", "I4: a bad call was not refused")
        self._check_held()

    def _held(self) -> set[str]:
        """Return the ids of all requests that the engine holds, or holds outputs of.

        An engine may undo an interrupted call only when it is called the next time.
        """
        self.engine.has_unfinished_requests()
        processor = self.engine.output_processor
        return {*processor.requests, *processor.parents, *processor.outbox} - {*processor.parent_of}

    def _check_held(self) -> None:
        """Check that the engine has the requests that are not done, and no other."""
        held, expected = self._held(), self.checker.live.keys()
        if unknown := held - expected:
            raise SoakError("wrong", f"I3: the engine still holds {sorted(unknown)}")
        if not self.engine.has_unfinished_requests() and expected:
            raise SoakError("lost", f"{sorted(expected)} never ended")

    def _check_idle(self) -> None:
        self._check_held()
        assert_idle(self.engine)
        self.engine.reset_prefix_cache()
        stats = self.engine.stats()
        if stats.kv_pages_free != stats.kv_pages_total:
            raise SoakError("wrong", f"I3: not all pages are free at the end: {stats}")
        self.tally.retractions += stats.num_retractions
        self.tally.extras += stats.num_draft_tokens
