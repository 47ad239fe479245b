"""Forced retractions: a scheduler that loses memory at regular steps, from the outside."""

from __future__ import annotations

import argparse
import logging
import weakref
from contextlib import ExitStack
from typing import Any

from ..request import Request
from .decisions import Decision, Note, watch

LEVELS = ("debug", "info", "warning", "error")

logger = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options with which a demo or a server shows retractions, and what is decided."""
    parser.add_argument(
        "--log-level",
        choices=LEVELS,
        default="warning",
        help="info: also what the engine decides: admissions, retractions, evictions",
    )
    parser.add_argument(
        "--retract-every", type=int, metavar="N",
        help="retract a request before every N-th step, although memory is not short",
    )  # fmt: skip


def apply_options(args: argparse.Namespace, engine: Any) -> None:
    """Force the retractions that were asked for, and log decisions from the level `info` on.

    Raises `ValueError` if the engine has no retractions.
    """
    if args.log_level in ("debug", "info"):
        watch(engine.core, logged(), ExitStack())
    if args.retract_every is None:
        return
    if args.retract_every < 1 or not hasattr(engine.core.scheduler, "retract"):
        raise ValueError("--retract-every needs a number from 1 on, and an engine from m3 on")
    force_retractions(engine.core.scheduler, args.retract_every)


def logged() -> Note:
    """Return a function that logs decisions. Why requests wait is logged when it changes."""
    last = ""

    def log(decision: Decision) -> None:
        nonlocal last
        if decision.kind != "wait" or decision.reason != last:
            logger.info(decision)
        if decision.kind == "wait":
            last = decision.reason

    return log


def force_retractions(scheduler: Any, every: int | None) -> None:
    """Make a scheduler retract a request before every `every`-th step. None: never.

    The newest request is retracted that has generated a token since its last forced retraction, so
    that every request still finishes (I5). The methods are replaced on this instance only.
    """
    if every is None:
        return
    schedule, steps = scheduler.schedule, 0
    tokens_when_retracted: weakref.WeakKeyDictionary[Request, int] = weakref.WeakKeyDictionary()

    def schedule_after_retraction() -> Any:
        nonlocal steps
        steps += 1
        if steps % every == 0:
            progressed = [
                request
                for request in scheduler.running
                if request.num_tokens
                > tokens_when_retracted.get(request, request.num_prompt_tokens)
            ]
            if progressed:
                tokens_when_retracted[progressed[-1]] = progressed[-1].num_tokens
                scheduler.retract(progressed[-1])
        return schedule()

    scheduler.schedule = schedule_after_retraction
    if hasattr(scheduler, "needs_result"):  # a request must not be retracted during its own step
        needs_result = scheduler.needs_result
        scheduler.needs_result = lambda: (steps + 1) % every == 0 or needs_result()
