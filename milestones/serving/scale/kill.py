"""Kill replicas under load, and see that each stream has exactly one end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2

CLIENTS = 6
MAX_TOKENS = 48
POLL = 0.05  # seconds
ENDS = ("complete", "error event", "refused")  # what may happen to a stream; nothing else may


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
    """Kill a replica (SIGKILL) so many times, while clients stream. Return how streams ended.

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
    body = {
        "model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    lines: list[str] = []
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as got:
            if got.status_code != 200:
                await got.aread()
                return "refused" if "error" in got.json() else "refused without a reason"
            lines = [line async for line in got.aiter_lines() if line.startswith("data: ")]
    except httpx2.HTTPError as error:
        return f"broken: {type(error).__name__}"
    return end_of([line.removeprefix("data: ") for line in lines])


def end_of(events: list[str]) -> str:
    """Return how a stream ended, by all its events."""
    values = [json.loads(event) for event in events if event != "[DONE]"]
    errors = [i for i, value in enumerate(values) if "error" in value]
    finished = [v for v in values if any(c["finish_reason"] for c in v.get("choices", ()))]
    if errors:
        is_last = errors == [len(values) - 1] and "[DONE]" not in events
        return "error event" if is_last and len(finished) < 2 else "something after an error"
    if not events or events[-1] != "[DONE]":
        return "no end"
    computed = [value["usage"]["completion_tokens"] for value in values if value.get("usage")]
    is_once = events.count("[DONE]") == len(finished) == 1 and computed == [MAX_TOKENS]
    return "complete" if is_once else "answered twice"
