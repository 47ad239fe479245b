"""What grammars take in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from common import Request, StructuredOutputsParams
from common.clock import VirtualClock
from common.virtual_time import wrap

from .engine import LLMEngine

COMPILE_MS = 10.0  # for a new grammar, in a thread of its own
MASK_MS = 0.05  # of the host, for the mask of one row

Compiled = list[tuple[Request, str | None]]


def add_costs(engine: LLMEngine, clock: VirtualClock) -> str:
    """Charge compilation and masks. Return what they take, in words.

    The real compilation ends before the engine looks at its result, and the request then waits
    until the virtual time of the compilation is over. So a run is the same on every machine.
    """
    manager = engine.core.scheduler.grammars
    compiled_at = dict[StructuredOutputsParams, float]()

    def ready_at(request: Request) -> float:
        structured = request.params.structured_outputs
        assert structured is not None, "only requests with a grammar are in this queue"
        return compiled_at.setdefault(structured, clock.now() + COMPILE_MS / 1000)

    def add_request(original: Callable[..., None], request: Request) -> None:
        original(request)
        ready_at(request)

    def take_compiled(original: Callable[[], Compiled]) -> Compiled:
        wait([future for future, _deadline in manager.queue.values()])
        queue = dict(manager.queue)
        early = {r: queue[r] for r in queue if ready_at(r) > clock.now()}
        for request in early:
            del manager.queue[request]
        taken = original()
        manager.queue |= early
        return taken

    def wait_for_one(_original: Callable[..., None], _seconds: float) -> None:
        clock.sleep(min(map(ready_at, manager.queue)) - clock.now())

    def sample(original: Callable[..., None], result: Any, rows: Any, bits: Any) -> None:
        clock.charge(len(rows) * MASK_MS / 1000)
        original(result, rows, bits)

    wrap(manager, "add_request", add_request)
    wrap(manager, "take_compiled", take_compiled)
    wrap(manager, "wait", wait_for_one)
    wrap(engine.core.runner, "sample", sample)
    return f", a new grammar {COMPILE_MS:g} ms in a thread, a mask {MASK_MS:g} ms"
