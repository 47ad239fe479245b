"""`scale measure` and `scale kill`: real replicas on this machine.

`kill` kills replicas under load, and sees that each stream has exactly one end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import httpx2
from rich.console import Console

from common import EngineConfig
from common.displays.demo import machine

from ..load.client import events, streamed
from ..server.settings import ServerSettings
from .measure import (
    MAX_NUM_SEQS,
    STEP_MS,
    STEP_TOKENS,
    WORKLOADS,
    Counted,
    emulated_steps,
    run_real,
    run_simulated,
)
from .page import measured_rows, on_screen
from .policy import POLICIES, make_policy
from .ray_replicas import RayReplicas, started_replicas
from .serve import FrontServer
from .settings import ScaleSettings

VOCABULARY = 250  # ids that every model has, also the tiny ones

CLIENTS = 6
MAX_TOKENS = 48
POLL = 0.05  # seconds
ENDS = {"complete", "error event", "refused"}  # what may happen to a stream; nothing else may


@contextmanager
def running_front(
    milestone: str, config: EngineConfig, num_replicas: int
) -> Iterator[tuple[FrontServer, RayReplicas]]:
    """Run a front with replicas in this process, on a free port."""
    settings = ServerSettings(port=0)
    with started_replicas(
        milestone, config, settings, ScaleSettings(replicas=num_replicas)
    ) as replicas:
        server = FrontServer(replicas, settings)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise RuntimeError("the front has not started")
                time.sleep(0.01)
            yield server, replicas
        finally:
            server.should_exit = True
            thread.join()


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure each policy on each workload, beside the simulator."""
    found = []
    config = EngineConfig(
        model=args.model, max_num_seqs=MAX_NUM_SEQS, device="cpu",
        emulated_forward_ms=STEP_MS, max_num_batched_tokens=STEP_TOKENS,
    )  # fmt: skip
    for num_replicas in args.replicas or (2, 4):
        with running_front(args.milestone, config, num_replicas) as (server, replicas):
            described = asyncio.run(replicas.learn())
            for name, workload in WORKLOADS.items():
                work = workload(VOCABULARY, seed=num_replicas)
                asyncio.run(run_real(server.address, described.model, work[:8]))  # warms up
                runs: dict[str, list[Counted]] = {policy: [] for policy in POLICIES}
                for _ in range(args.rounds):
                    for policy in POLICIES:
                        asyncio.run(replicas.reset(make_policy(policy)))
                        real = asyncio.run(run_real(server.address, described.model, work))
                        runs[policy].append(real)
                        console.print(f"{num_replicas} {name} {policy}: {real.hit_rate:.3f}")
                for policy, several in runs.items():
                    simulated = run_simulated(
                        work, policy, num_replicas, described.num_pages, emulated_steps()
                    )
                    found.append(
                        {
                            "replicas": num_replicas, "workload": name, "policy": policy,
                            "hit_rate": round(median(one.hit_rate for one in several), 4),
                            "simulated": round(simulated, 4),
                            "ttft_mean": round(median(mean(one.first) for one in several), 4),
                        }
                    )  # fmt: skip
    console.print(on_screen(f"Replicas on {machine()}", measured_rows(found)))
    return {"machine": machine(), "model": args.model, "rounds": args.rounds, "rows": found}


def kill(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Kill replicas under load. Exit status 1 if a stream had no end, or two answers."""
    config, num_replicas = EngineConfig(model=args.model), max(2, *(args.replicas or (2,)))
    with running_front(args.milestone, config, num_replicas) as (server, _):
        ends = asyncio.run(kill_under_load(server.address, server.model, args.times))
        retried = server.front.calls.retried
    console.print(f"{len(ends.killed)} replicas killed; {retried} calls were sent again")
    for kind, count in ends.streams.most_common():
        console.print(f"{count} streams: {kind}")
    return {
        "machine": machine(), "killed": len(ends.killed), "retried": retried,
        "streams": dict(ends.streams),
    }  # fmt: skip


@dataclass
class Ends:
    """How streams have ended, by kind; and which replicas were killed."""

    streams: Counter[str] = field(default_factory=Counter)
    killed: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Return the number of streams without an end, or with a second answer."""
        return sum(count for kind, count in self.streams.items() if kind not in ENDS)


async def kill_under_load(url: str, model: str, times: int, seed: int = 0) -> Ends:
    """Kill a replica (SIGKILL) that many times, while clients stream. Return how streams ended.

    A kill waits until two replicas are there, and until the replica that it takes has a request.
    """
    ends, stop, source = Ends(), asyncio.Event(), random.Random(seed)
    async with httpx2.AsyncClient(timeout=600.0) as client:

        async def use() -> None:
            while not stop.is_set():
                prompt = [source.randint(10, 200) for _ in range(source.randint(20, 120))]
                ends.streams[await stream(client, url, model, prompt)] += 1

        users = [asyncio.create_task(use()) for _ in range(CLIENTS)]
        try:
            for _ in range(times):
                victim = await _victim(client, url, source)
                os.kill(victim["pid"], signal.SIGKILL)
                ends.killed.append(victim["name"])
                while victim["name"] in {row["name"] for row in await replicas(client, url)}:
                    await asyncio.sleep(POLL)
        finally:
            stop.set()
            await asyncio.gather(*users)
    return ends


async def replicas(client: httpx2.AsyncClient, url: str) -> list[dict[str, Any]]:
    """Return what the router knows about each replica."""
    rows: list[dict[str, Any]] = (await client.get(f"{url}/replicas")).json()["replicas"]
    return rows


async def _victim(client: httpx2.AsyncClient, url: str, source: random.Random) -> dict[str, Any]:
    while True:
        rows = await replicas(client, url)
        busy = [row for row in rows if row["load"]]
        if len(rows) > 1 and busy:
            return source.choice(busy)
        await asyncio.sleep(POLL)


async def stream(client: httpx2.AsyncClient, url: str, model: str, prompt: list[int]) -> str:
    """Send a request, follow its stream, and return how it ended."""
    body = streamed(model, prompt, MAX_TOKENS)
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as got:
            if got.status_code != 200:
                await got.aread()
                return "refused" if "error" in got.json() else "refused without a reason"
            return end_of([data async for data in events(got)])
    except httpx2.HTTPError as error:
        return f"broken: {type(error).__name__}"


def end_of(found: list[str]) -> str:
    """Return how a stream ended, by all its events."""
    values = [json.loads(event) for event in found if event != "[DONE]"]
    errors = [i for i, value in enumerate(values) if "error" in value]
    finished = [v for v in values if any(c["finish_reason"] for c in v.get("choices", ()))]
    if errors:
        is_last = errors == [len(values) - 1] and "[DONE]" not in found
        return "error event" if is_last and len(finished) < 2 else "something after an error"
    if not found or found[-1] != "[DONE]":
        return "no end"
    computed = [value["usage"]["completion_tokens"] for value in values if value.get("usage")]
    is_once = found.count("[DONE]") == len(finished) == 1 and computed == [MAX_TOKENS]
    return "complete" if is_once else "answered twice"
