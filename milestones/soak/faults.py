"""Injected failures: hooks on the model during one schedule."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from common import OfflineEngine

from .plan import Fault, Plan

FAILURES = (RuntimeError, ValueError, MemoryError, ZeroDivisionError)
MESSAGE = "injected by the soak"
BROKEN_LOGITS = (torch.nan, torch.inf, -torch.inf)  # a row of one of these values


class Faults:
    """Makes forwards fail as a plan says, and counts the failures.

    A forward fails before its first layer, or before its second one, when a part of its keys and
    values is already written. It fails because of its number, or because it feeds a token with a
    fault.
    """

    def __init__(self, plan: Plan) -> None:
        self.num_forwards = 0
        self.num_injected = 0
        self.failing = set(plan.failing_forwards)
        faults = [r.fault for a in plan.arrivals for r in a.requests if r.fault]
        self.forward_faults = [f for f in faults if f.kind == "forward"]
        self.logits_faults = [f for f in faults if f.kind == "logits"]
        self.pending: Exception | None = None  # raised before the second layer

    @contextmanager
    def on(self, model: torch.nn.Module) -> Iterator[None]:
        """Install the hooks, and remove them at the end. Without faults there is nothing to do."""
        if not (self.failing or self.forward_faults or self.logits_faults):
            yield
            return
        layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
            layers[1].register_forward_pre_hook(self._half_way),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def break_text(self, engine: OfflineEngine, request_id: str, nth: int) -> None:
        """Make the text of a request raise at its `nth` output token, counted from 1."""
        text = engine.output_processor.requests[request_id].text
        append, calls = text.append, itertools.count(1)

        def failing(token_id: int) -> bool:
            if next(calls) >= nth:
                self.num_injected += 1
                raise _failure(nth)
            return append(token_id)

        vars(text)["append"] = failing

    def _before(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self.num_forwards += 1
        self.pending = None
        fed = any(_place(fault, kwargs) for fault in self.forward_faults)
        if fed or self.num_forwards in self.failing:
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
