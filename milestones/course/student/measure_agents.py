"""The measurement of `agents`: what each policy of the cache computes again, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from common import EngineConfig, load_model
from common.virtual_time import use_virtual_time

from ...chain import load
from ...lab.bench.agents import POLICIES, AgentDriver, Resumed, agent_load, tail_of
from .measuring import Row

PAGE_SIZE = 4
SHARE = 0.5  # of the working set: the pages of the pool


def by_policy(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """agents: the same calls with each policy. sizes: host pages for each page of the pool."""
    for size, policy in product(sizes, POLICIES):
        driver = served(milestone, model, policy, size)
        everyone, tail = Resumed.of(driver.resumed()), Resumed.of(tail_of(driver.resumed()))
        yield (
            policy + " + host" * (size > 0),
            f"{everyone.computed:.0f}", f"{everyone.hit_rate:.0%}",
            *(f"{1000 * point:.0f}" for point in everyone.points),
            f"{tail.computed:.0f}", f"{tail.hit_rate:.0%}",
            f"{1000 * tail.mean:.1f}",
        )  # fmt: skip


def served(milestone: str, model: str, policy: str, size: float) -> AgentDriver:
    """Serve the load of the agents with a policy. Return the driver, which has the calls."""
    calls = agent_load()
    num_pages = int(SHARE * calls.num_tokens / PAGE_SIZE)
    config = EngineConfig(
        model=model, device="cpu", max_num_seqs=8, max_model_len=512, page_size=PAGE_SIZE,
        num_pages=num_pages,
    )  # fmt: skip
    driver = AgentDriver(calls, policy)
    with load(milestone).LLMEngine(config, load_model(config)) as engine:
        use_virtual_time(engine)
        cache: Any = engine.core.scheduler.kv_cache.radix_cache
        cache.resize_host(int(size * num_pages))
        while not driver.done:
            driver.add_due(engine, engine.now())
            for output in engine.step():
                driver.take(output, engine.now())
        return driver
