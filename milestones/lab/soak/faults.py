"""Injected failures: of the parts of a step, of single tokens, and of rows of logits."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from common import LLMEngine, Request, StructuredOutputsParams

from .parts import Fault, PartFault, find, is_searching, parts_of
from .plan import Plan

FAILURES = (RuntimeError, ValueError, MemoryError, ZeroDivisionError)
MESSAGE = "injected by the soak"
BROKEN_LOGITS = (torch.nan, torch.inf, -torch.inf)  # a row of one of these values
# Schedules between two failures of parts. By then, the engine has noticed the first one. The next
# one also waits until the engine has tried all requests again: two failures would end a request.
LEAST_DISTANCE = 10


class Faults:
    """Makes parts of steps fail as a plan says, and counts the failures.

    A forward that feeds a token with a fault fails before its first layer, or before its second
    one, when a part of its keys and values is already written.
    """

    def __init__(self, plan: Plan) -> None:
        self.num_forwards = 0
        self.num_injected = 0
        self.num_part_faults = 0
        self.part_faults = [replace(fault) for fault in plan.part_faults]
        self.is_over = False  # no part fails any more
        faults = [r.fault for a in plan.arrivals for r in a.requests if r.fault]
        self.forward_faults = [f for f in faults if f.kind == "forward"]
        self.logits_faults = [f for f in faults if f.kind == "logits"]
        self.pending: Exception | None = None  # raised before the second layer
        self.num_schedules = 0
        self.last_fault = -LEAST_DISTANCE  # the schedule of the last failure of a part
        self.batch: list[Request] = []  # of the last schedule
        self.is_searching: Callable[[], bool] = bool  # for the cause of a failure

    @contextmanager
    def on(self, engine: Any, milestone: str) -> Iterator[None]:
        """Install everything, and remove it at the end."""
        model = engine.loaded.model
        with ExitStack() as stack:
            if self.forward_faults or self.logits_faults:
                layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
                for hook in (
                    model.register_forward_pre_hook(self._before, with_kwargs=True),
                    model.register_forward_hook(self._after, with_kwargs=True),
                    layers[1].register_forward_pre_hook(self._half_way),
                ):
                    stack.callback(hook.remove)
            if self.part_faults:
                self.is_searching = lambda: is_searching(engine)
                stack.enter_context(replaced(*find("schedule", engine, milestone), self._watched))
            for part in {fault.part for fault in self.part_faults}:
                place = find(part if part in parts_of(milestone) else "forward", engine, milestone)
                stack.enter_context(replaced(*place, self._failing(part)))
            yield

    def break_text(self, engine: LLMEngine, request_id: str, nth: int) -> None:
        """Make the text of a request raise at its `nth` output token, counted from 1."""
        text = engine.output_processor.requests[request_id].text
        append, calls = text.append, itertools.count(1)

        def failing(token_id: int) -> bool:
            if next(calls) >= nth:
                self.num_injected += 1
                raise _failure(nth)
            return append(token_id)

        vars(text)["append"] = failing

    def _watched(self, schedule: Callable[[], Any]) -> Callable[[], Any]:
        def watched() -> Any:
            self.num_schedules += 1
            batch = schedule()
            self.batch = batch.requests
            return batch

        return watched

    def _failing(self, part: str) -> Callable[[Any], Any]:
        """Return a wrapper that makes calls of a part fail."""

        def wrap(call: Any) -> Any:
            def failing(*args: Any, **kwargs: Any) -> Any:
                fault = next((f for f in self.part_faults if self._hits(f, part, args)), None)
                if fault is None:
                    return call(*args, **kwargs)
                if not fault.lasts:
                    self.part_faults.remove(fault)
                self.last_fault = self.num_schedules
                self.num_part_faults += 1
                self.num_injected += 1
                if fault.is_late:
                    call(*args, **kwargs)
                if part == "compile":  # a ValueError would be remembered: it is a verdict
                    raise MemoryError(MESSAGE)
                raise _failure(self.num_schedules)

            return failing

        return wrap

    def _hits(self, fault: PartFault, part: str, args: tuple[Any, ...]) -> bool:
        """Return whether this call of a part must fail."""
        if self.is_over or fault.part != part or self.num_schedules < fault.step:
            return False
        is_early = self.num_schedules < self.last_fault + LEAST_DISTANCE
        if fault.victim is None and (is_early or self.is_searching()):
            return False
        if fault.victim is not None and not self._concerns(fault, args):
            return False
        fault.skipped += 1
        return fault.skipped > fault.skip

    def _concerns(self, fault: PartFault, args: tuple[Any, ...]) -> bool:
        """Return whether a call works for the victim. If it does not say, its step decides."""
        for arg in args:
            if isinstance(arg, Request):
                return arg.request_id == fault.victim
            if isinstance(arg, StructuredOutputsParams):
                return arg == fault.grammar
        return any(r.request_id == fault.victim and not r.is_finished for r in self.batch)

    def _before(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self.num_forwards += 1
        self.pending = None
        if any(_place(fault, kwargs) for fault in self.forward_faults):
            self.num_injected += 1
            self.pending = _failure(self.num_forwards)
            if self.num_forwards % 2:
                raise self.pending

    def _half_way(self, *_: Any) -> None:
        if self.pending is not None:
            raise self.pending

    def _after(self, _module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        for fault in self.logits_faults:
            if place := _place(fault, kwargs):
                row, column = place
                columns = (_kept_tokens(kwargs) == column).nonzero().flatten()
                self.num_injected += len(columns)
                broken = BROKEN_LOGITS[fault.position % len(BROKEN_LOGITS)]
                output.logits[row, columns] = broken


def _place(fault: Fault, kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """Return where in `input_ids` [B, T] a forward feeds the token of a fault."""
    ids, positions = kwargs["input_ids"], kwargs["position_ids"]
    found = ((ids == fault.token) & (positions == fault.position)).nonzero()
    return (int(found[0, 0]), int(found[0, 1])) if len(found) else None


def _kept_tokens(kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the tokens that a forward computes logits for: their indices in T.

    The pass that trims the last layer renames `logits_to_keep` to `tokens_to_keep`.
    """
    kept = kwargs.get("tokens_to_keep", kwargs["logits_to_keep"])
    if isinstance(kept, torch.Tensor):
        return kept
    tokens = torch.arange(kwargs["input_ids"].shape[1])
    return tokens[kept] if isinstance(kept, slice) else tokens[-kept:]


def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Replace a function by `wrap(function)` for the time of a block."""
    return patch.object(owner, name, wrap(getattr(owner, name)))


def _failure(number: int) -> Exception:
    return FAILURES[number % len(FAILURES)](MESSAGE)


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Keep the engines' reports of injected failures off the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
