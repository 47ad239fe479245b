"""Send requests at their times, and note when their tokens come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from .arrivals import Arrival


@dataclass
class Answer:
    """What happened to a request. Times are in seconds.

    first: from sending it to its first text. gaps: from one event with text to the next. total:
    from sending it to its end. late: how much later than planned it was sent; if this is large, the
    client was the bottleneck. usage: the token counts, as the server sends them.
    """

    arrival: Arrival
    late: float = 0.0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    total: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Return the number of output tokens, as the server counts them."""
        return int(self.usage.get("completion_tokens", 0))

    @property
    def per_token(self) -> float:
        """Return the mean time from one token to the next."""
        if self.first is None or self.num_tokens < 2:
            return 0.0
        return (self.total - self.first) / (self.num_tokens - 1)


def streamed(model: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Return the body of a completion that streams exactly `max_tokens` tokens and their count."""
    return {
        "model": model, "prompt": prompt, "temperature": 0, "max_tokens": max_tokens,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


async def events(got: httpx2.Response) -> AsyncIterator[str]:
    """Yield the data of the events of a stream, as they come. The last one may be `[DONE]`."""
    async for line in got.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


class Target:
    """A server, by the URL of its API, such as http://127.0.0.1:8000/v1."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self.client = httpx2.AsyncClient(headers=headers, timeout=600.0, limits=limits)

    async def model(self) -> str:
        """Return the name of the server's first model."""
        answer = (await self.client.get(f"{self.url}/v1/models")).raise_for_status().json()
        return str(answer["data"][0]["id"])

    async def tokenize(self, model: str, text: str) -> list[int]:
        """Return the token ids of a text."""
        body = {"model": model, "prompt": text}
        answer = (await self.client.post(f"{self.url}/tokenize", json=body)).raise_for_status()
        return [int(token_id) for token_id in answer.json()["tokens"]]

    async def run(self, model: str, arrivals: Sequence[Arrival]) -> list[Answer]:
        """Send all requests at their times. A late answer never delays the next request."""
        start = time.perf_counter()
        tasks = []
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, start + arrival.time - time.perf_counter()))
            late = time.perf_counter() - start - arrival.time
            tasks.append(asyncio.create_task(self.send(model, Answer(arrival, late))))
        return list(await asyncio.gather(*tasks))

    async def send(self, model: str, answer: Answer) -> Answer:
        """Send the request of `answer` now, follow its stream, and return what happened to it."""
        body = streamed(model, answer.arrival.prompt, answer.arrival.max_tokens)
        start = time.perf_counter()
        try:
            async with self.client.stream("POST", f"{self.url}/v1/completions", json=body) as got:
                if got.status_code != 200:
                    answer.error = f"status {got.status_code}"
                    return answer
                await self._follow(answer, got, start)
        except httpx2.HTTPError as error:
            answer.error = type(error).__name__
        answer.total = time.perf_counter() - start
        if answer.error is None and answer.first is None:
            answer.error = "no text"
        return answer

    async def _follow(self, answer: Answer, got: httpx2.Response, start: float) -> None:
        last = start
        async for data in events(got):
            if data == "[DONE]":
                continue
            event, now = json.loads(data), time.perf_counter()
            if "error" in event:
                answer.error = str(event["error"]["message"])
            if event.get("usage"):
                answer.usage = event["usage"]
            if not event.get("choices") or not event["choices"][0]["text"]:
                continue
            if answer.first is None:
                answer.first = now - start
            else:
                answer.gaps.append(now - last)
            last = now
