"""Calls with bad input. Each must raise `ValueError`, and change nothing (I4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import SamplingParams

# Each call gets the engine and the id of a request in flight.
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
