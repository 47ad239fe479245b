"""Calls that an engine must refuse, and that change nothing (I4)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common import EngineDeadError, SamplingParams

from .plan import Arrival
from .tally import SoakError

# Each call gets the engine and the id of a request in flight, and must raise `ValueError`.
BAD_CALLS: tuple[Callable[[Any, str], object], ...] = (
    lambda engine, _: engine.add_request(""),
    lambda engine, _: engine.add_request([]),
    lambda engine, _: engine.add_request([1, -1]),
    lambda engine, _: engine.add_request([1, 10**9]),
    lambda engine, _: engine.add_request([1, 2.5]),
    lambda engine, _: engine.add_request(5),
    lambda engine, _: engine.add_request([1] * engine.config.max_model_len),
    lambda engine, _: engine.add_request([1], {}),
    lambda engine, _: engine.add_request([1], None, 7),
    lambda engine, in_flight: engine.add_request([1], None, in_flight),
    lambda engine, _: engine.add_request([1], SamplingParams(stop_token_ids=[10**9])),
    lambda engine, _: engine.add_request([1], SamplingParams(logprobs=10**9)),
    lambda engine, _: engine.generate(b"bytes"),
    lambda engine, _: engine.generate([[1], [2]], [SamplingParams()]),
    lambda engine, _: engine.generate([[1], [10**9], [2]]),
    lambda engine, _: engine.stream(""),
    lambda engine, _: engine.chat([]),
)


def add_too_long(engine: Any, arrival: Arrival) -> None:
    """Send a prompt that can never be computed. `generate` must refuse its neighbours too."""
    prompts = [request.prompt for request in arrival.requests]
    params = [request.asked for request in arrival.requests]
    if arrival.how == "generate":
        engine.generate(prompts, params, progress=False)
    else:
        (engine.stream if arrival.how == "stream" else engine.add_request)(prompts[0], params[0])


def call_from_another_thread(engine: Any) -> None:
    """Raise the error of `step` in a thread that has not called this engine before."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(engine.step).result()


def check_dead(engine: Any) -> None:
    """Check that an engine that a failure has ended refuses each call."""
    for call in (engine.step, lambda: engine.generate([[1]], progress=False)):
        try:
            call()
        except EngineDeadError:
            continue
        raise SoakError("wrong", "the engine goes on after a failure that it did not undo")
