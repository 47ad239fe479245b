"""The measurements of `disaggregated`: two machines, as two equal engines or as two sides.

Long prompts arrive while other requests decode. All times are virtual, so they are the same on
every machine: see `virtual_costs.py` of the elective.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

from common import EngineConfig, load_model
from common.clock import StepCosts
from common.displays.workload import Workload, WorkloadResult, percentile, run
from common.hf.loaded_model import LoadedModel
from common.virtual_time import use_virtual_time

from ...chain import load
from .measuring import Row, lower_engine

PAGE_SIZE = 16
PROMPT, ANSWER = 448, 32  # tokens of a long request
NUM_LONG = 48
NUM_TALKS, TALK = 16, 400  # requests with short prompts, and their output tokens
EVERY = 0.08  # seconds between two long prompts on the average, of both machines together
CHUNKS = (64, 256)  # tokens of a step of the equal engines, where the table is about load
LARGEST = 1024  # tokens of a step of the prefill side: there is no reason for small chunks
# A model of 8 billion parameters on a GPU: a step takes 8 ms, and 10,000 tokens take a second more.
COSTS = StepCosts(host=0.4, host_row=0.02, forward=8.0, forward_token=0.1)


@dataclass
class Served:
    """Inter-token latencies, times to first token of long prompts, and the whole run."""

    gaps: list[float]
    firsts: list[float]
    seconds: float
    num_tokens: int
    link: Any = None  # of two sides

    def cells(self) -> tuple[str, ...]:
        """Return the times in milliseconds."""
        return (
            f"{1000 * percentile(self.gaps, 50):.1f}", f"{1000 * percentile(self.gaps, 99):.1f}",
            f"{1000 * percentile(self.firsts, 50):.0f}",
            f"{1000 * percentile(self.firsts, 95):.0f}",
        )  # fmt: skip


def by_chunk(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """disaggregated: two m5 engines with chunks of each size, and then one of each side."""
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    for size in map(int, sizes):
        served = colocated(lower_engine(milestone), loaded, EVERY, size)
        yield (f"2 x m5, chunks of {size}", *served.cells(), "", "")
    served = two_sides(milestone, loaded, EVERY)
    link = served.link
    hidden = 1 - link.exposed_seconds / link.seconds
    per_request = link.num_bytes / 1e6 / NUM_LONG
    yield ("1 prefill, 1 decode", *served.cells(), f"{per_request:.0f}", f"{hidden:.0%}")


def by_load(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """disaggregated: the same machines with more prompts. sizes: milliseconds between two."""
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    for size in sizes:
        every = size / 1000
        runs = [colocated(lower_engine(milestone), loaded, every, chunk) for chunk in CHUNKS]
        runs.append(two_sides(milestone, loaded, every))
        load_of_one = COSTS.forward_seconds(PROMPT) / every  # if one machine computes all prompts
        latencies = (
            (f"{1000 * percentile(run.gaps, 99):.0f}", f"{1000 * percentile(run.firsts, 95):.0f}")
            for run in runs
        )
        yield (f"{size:.0f}", f"{load_of_one:.0%}", *chain(*latencies))


def colocated(name: str, loaded: LoadedModel, every: float, chunk: int) -> Served:
    """Serve half of the requests on each of two engines that do both."""
    halves = [serve(name, loaded, workload_of(every, i), chunk)[0] for i in range(2)]
    return Served(
        [gap for half in halves for gap in half.inter_token_seconds],
        [first for half in halves for first in half.first_token_seconds[NUM_TALKS // 2 :]],
        max(half.seconds for half in halves),
        sum(len(tokens) for half in halves for tokens in half.token_ids),
    )


def two_sides(milestone: str, loaded: LoadedModel, every: float) -> Served:
    """Serve all requests on one prefill side and one decode side."""
    result, engine = serve(milestone, loaded, workload_of(every), LARGEST)
    return Served(
        result.inter_token_seconds,
        result.first_token_seconds[NUM_TALKS:],
        result.seconds,
        sum(map(len, result.token_ids)),
        engine.core.prefill.runner.link,
    )


def workload_of(every: float, half: int | None = None) -> Workload:
    """Return the requests of both machines, or every second one of them."""
    chosen = slice(half, None, 1 if half is None else 2)
    talks = [[1 + i, 2, 3] for i in range(NUM_TALKS)][chosen]
    long = [[20 + i] + [5 + (7 * i + j) % 90 for j in range(PROMPT - 1)] for i in range(NUM_LONG)]
    chance = random.Random(1)
    due = [every * at for at in accumulate(chance.expovariate(1) for _ in long)]
    long, due = long[chosen], due[chosen]
    return Workload(
        [*talks, *long], [TALK] * len(talks) + [ANSWER] * len(long),
        ignore_eos=True, arrivals=[0.0] * len(talks) + due,
    )  # fmt: skip


def serve(
    name: str, loaded: LoadedModel, workload: Workload, chunk: int
) -> tuple[WorkloadResult, Any]:
    """Serve requests in virtual time. Return the result, and the engine, which is closed."""
    config = EngineConfig(
        model=loaded.name, device="cpu", page_size=PAGE_SIZE, max_num_seqs=64, max_model_len=512,
        num_pages=2400, max_num_batched_tokens=chunk,
    )  # fmt: skip
    with load(name).LLMEngine(config, loaded) as engine:
        use_virtual_time(engine, COSTS)
        return run(engine, workload), engine
