"""`measure_costs`: the costs of a step on this machine, for a run in virtual time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

from ..clock import StepCosts
from ..llm_engine import LLMEngine
from ..sampling.params import SamplingParams
from .workload import watch_forwards

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 12
MOST_REQUESTS = 4


def measure_costs(engine: LLMEngine) -> StepCosts:
    """Return what steps of such an engine take on this machine. Another engine is measured.

    Each cost is a line through two runs: of one request and of several, and of one token and of
    a prompt.
    """
    rows = min(MOST_REQUESTS, engine.config.max_num_seqs)
    with type(engine)(engine.config, engine.loaded) as measured:
        _measure(measured, rows)  # first forwards are slow
        host, decode, prefill = _measure(measured, 1)
        host_of_all = _measure(measured, rows)[0] if rows > 1 else host
    host_row = max(0.0, host_of_all - host) / max(1, rows - 1)
    token = max(0.0, prefill - decode) / (PROMPT_TOKENS - 1)
    return StepCosts(max(0.0, host - host_row), host_row, max(0.0, decode - token), token)


def _measure(engine: Any, num_requests: int) -> tuple[float, float, float]:
    """Return milliseconds: of the host for a step, of a decode forward, and of a whole prompt's."""
    engine.reset_prefix_cache()
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)
    prompts = [[1 + (i * i + n) % 200 for i in range(PROMPT_TOKENS)] for n in range(num_requests)]
    steps_before = engine.stats().num_steps
    with ExitStack() as undo:
        forwards = watch_forwards(engine, undo)
        own = undo.enter_context(_host_seconds(engine.core.runner.model))
        for prompt in prompts:
            engine.add_request(prompt, params)
        while engine.has_unfinished_requests():
            engine.step()
        seconds = [end - begin for begin, end in forwards.take()]
    host = own[0] / (engine.stats().num_steps - steps_before)
    return 1e3 * host, 1e3 * median(seconds), 1e3 * max(seconds)


@contextmanager
def _host_seconds(model: Any) -> Iterator[list[float]]:
    """Return a list with what this thread computes in the context, once it has ended.

    Forwards of this thread do not count, and neither do its waits.
    """
    thread, result, on_cpu = threading.get_ident(), [0.0], model.device.type == "cpu"

    def mark(sign: int) -> None:
        if threading.get_ident() == thread and on_cpu:
            result[0] += sign * time.thread_time()

    begin = model.register_forward_pre_hook(lambda *_: mark(1))
    end = model.register_forward_hook(lambda *_: mark(-1))
    started = time.thread_time()
    try:
        yield result
    finally:
        result[0] += time.thread_time() - started
        begin.remove()
        end.remove()
