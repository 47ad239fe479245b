"""Audited engines: after each step, check the invariants and fill free memory with NaN."""

from __future__ import annotations

import functools
import math
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...chain import load
from .streams import EarlyStream, LateStream

if TYPE_CHECKING:
    import torch

    from common import LLMEngine, RequestOutput

STREAMS = {"early": EarlyStream, "late": LateStream}
MODES = ("overlap", "serial", *STREAMS)  # how the engines with a forward stream use it


@functools.cache
def audited_engine_class(milestone: str, mode: str) -> type[LLMEngine]:
    """Return the engine of a milestone, with an audit after every step.

    mode: one of `MODES`. `early` and `late` replace the forward stream. `overlap` and `serial` are
    chosen by `EngineConfig.enable_overlap`. An engine without a forward stream ignores the mode.
    """
    engine_class = load(milestone).LLMEngine

    class AuditedEngine(engine_class):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if hasattr(self.core.runner, "stream"):
                for side in sides(self) if mode in STREAMS else ():
                    for name in ("stream", "copy_stream", "send_stream"):
                        if hasattr(side.runner, name):
                            setattr(side.runner, name, STREAMS[mode]())
                # Static steps as on a GPU, of sizes with gaps that end below the largest batch.
                # This covers padding and batches without a graph.
                sizes = [2, 3, 5, 12] if self.has_static_steps() else []
                self.core.runner.graphs.sizes = sizes
            poison_free_pages(self)

        def has_static_steps(self) -> bool:
            states = getattr(self.core.runner, "states", None)
            has_windows = getattr(self.core.runner, "is_hybrid", False)
            has_states = states is not None and bool(states.groups)
            return self.config.cuda_graph and not has_windows and not has_states

        def step(self) -> list[RequestOutput]:
            with self.guard("step") as call:  # an interrupt in the audit must not lose the outputs
                outputs = call.keep(super().step())
                audit(self)
                return outputs

    return AuditedEngine


def sides(engine: Any) -> list[Any]:
    """Return the cores of an engine: one, or its decode side and its prefill side."""
    core = engine.core
    return [core, core.prefill] if hasattr(core, "prefill") else [core]


def audit(engine: LLMEngine) -> None:
    """Check the invariants, then fill all free pages with NaN."""
    engine.check_invariants()
    poison_free_pages(engine)


def poison_of(memory: torch.Tensor) -> float:
    """Return the number that free pages are filled with.

    In packed lines all bits are set, and a scale with all bits set is NaN, too.
    """
    all_bits = -1 if memory.dtype.is_signed else 255
    return math.nan if memory.is_floating_point() else all_bits


def poison_free_pages(engine: LLMEngine) -> None:
    """Fill the padding page, and the pages and states that nothing owns, with NaN.

    An engine without pages is not changed. On a forward stream, this work is queued like a forward:
    a step in flight may still read a page that was just freed, but a later step may not. Copies may
    read it too, so the work waits for them as a forward does.
    """
    for core in sides(engine):
        _poison_pool(core)


def _poison_pool(core: Any) -> None:
    kv_cache: Any = getattr(core.scheduler, "kv_cache", None)
    allocator = getattr(kv_cache, "allocator", None)
    if allocator is None:
        return
    runner: Any = core.runner
    memories, pages = (*runner.kv_pool.keys, *runner.kv_pool.values), [0, *allocator.free_pages]
    states: Any = getattr(runner, "states", None)  # of an engine with recurrent states
    slots = list(kv_cache.free_rows) if states else []
    for group in getattr(allocator, "states", ()):
        slots += [states.num_rows + slot for slot in group.free_slots]

    def poison() -> None:
        # Another engine writes to a page that is allocated again, and waits for no forward here.
        is_target = hasattr(core, "receiver")
        still_free = {0, *allocator.free_pages} if is_target else {*pages}
        filled = [page for page in pages if page in still_free]
        for memory in memories:
            memory[:, filled] = poison_of(memory)
        for part in states.parts.values() if states else ():
            part[slots] = math.nan

    if not hasattr(runner, "stream"):
        poison()
        return
    if hasattr(core, "receiver"):
        poisoned = runner.stream.launch(poison)
        if not isinstance(runner.stream, LateStream):  # on a thread, a page could be filled late
            with suppress(BaseException):  # of a forward before it
                poisoned.wait()
        return
    if hasattr(runner, "send_stream"):  # a page that was freed may still be sent
        sent, wait = runner.reusable, sys.modules[type(runner).__module__].wait_in_stream

        def poison_after_sends() -> None:
            wait(sent)
            poison()

        runner.stream.launch(poison_after_sends)
        return
    if not hasattr(runner, "copy_stream"):
        runner.stream.launch(poison)
        return
    copied, wait_in_stream = runner.copied, sys.modules[type(runner).__module__].wait_in_stream

    def poison_after_copies() -> None:
        wait_in_stream(copied, raising=False)
        poison()

    # Copies that are started later wait for it: a page is filled before it is loaded from host.
    runner.computed = runner.stream.launch(poison_after_copies)


def assert_idle(engine: LLMEngine) -> None:
    """Check that an engine without requests holds nothing (I3)."""
    engine.check_invariants()
    stats = engine.stats()
    assert not engine.has_unfinished_requests(), "I3: a request is held"
    assert (stats.num_waiting, stats.num_running) == (0, 0), f"I3: a request is held: {stats}"
    assert (stats.kv_tokens_reserved, stats.kv_tokens_used) == (0, 0), f"I3: KV is held: {stats}"
    assert stats.kv_pages_free + stats.kv_pages_cached == stats.kv_pages_total, f"I3: {stats}"
