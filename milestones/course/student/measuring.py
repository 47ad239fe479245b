"""What the measurements of counters and of times share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from common import EngineConfig
from common.displays.workload import Workload, WorkloadResult, run

from ...chain import below, load

TINY = "tiny-llama"  # for counters, which do not depend on the model
Row = tuple[str, ...]


@dataclass(frozen=True)
class Measurement:
    """The columns of a table, and the function that yields its rows for a sequence of sizes."""

    columns: Row
    rows: Callable[[str, str, tuple[float, ...]], Iterator[Row]]
    model: str
    sizes: tuple[float, ...]
    conclusion: str  # what the table shows, in a sentence or two


def measured(
    milestone: str,
    workload: Workload,
    *,
    num_steps: int | None = None,
    ends: Iterable[int] = (),
    **made: Any,
) -> WorkloadResult:
    """Run a workload on a new engine of a milestone, after a warm-up that leaves nothing cached.

    num_steps: of each plan, for an engine that has plans. ends: more tokens that end a request.
    """
    package = load(milestone)
    with package.LLMEngine(EngineConfig(device="cpu", **workload.config), **made) as engine:
        if num_steps is not None:
            engine.core.scheduler.num_steps = num_steps
        engine.input_processor.eos_token_ids |= frozenset(ends)
        run(engine, workload.warm_up())
        engine.reset_prefix_cache()
        return run(engine, workload)


def lower_engine(elective: str) -> str:
    """Return the engine that an elective lies on."""
    lower = below(elective)
    assert lower is not None, "an elective lies on a milestone"
    return lower


def milliseconds(seconds: list[float]) -> str:
    """Return the median in milliseconds, as text."""
    return f"{1e3 * median(seconds):.2f}"


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Return random prompts for any vocabulary."""
    drawn = random.Random(seed)
    return [[drawn.randrange(3, 250) for _ in range(length)] for length in lengths]


def short_and_long() -> list[tuple[list[int], int]]:
    """Return the prompts and output lengths of the 14 requests in the handouts of m1 to m3."""
    drawn = random.Random(5)
    return [
        ([drawn.randrange(50) for _ in range(drawn.randint(4, 32))], drawn.randint(8, 64))
        for _ in range(14)
    ]
