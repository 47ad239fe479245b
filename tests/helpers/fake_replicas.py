"""Replicas without engines, for the tests of the front."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from milestones.serving.scale.prefix_index import CacheReport
from milestones.serving.scale.routing import Routing
from milestones.serving.scale.wire import (
    Description,
    ForwardedCall,
    Head,
    Item,
    ReplicaDiedError,
    Tail,
)

EVENTS = (b"data: one\n\n", b"data: two\n\n", b"data: [DONE]\n\n")
STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"),)


class FakeReplicas:
    """Answers with `EVENTS`. `dies_after[name]` pieces of an answer, a replica dies."""

    def __init__(self, names: Sequence[str], policy: str = "prefix", most_open: int = 8) -> None:
        self.routing = Routing(policy, most_open)
        self.routing.update(names)
        self.balancer = self.routing.balancer
        self.dies_after: dict[str, int] = {}
        self.headers = STREAM
        self.fails = False
        self.answered: list[str] = []  # the replica of each answer that began
        self.ended: list[str] = []
        self.gate = asyncio.Event()  # answers wait for it after their first piece
        self.gate.set()
        self.report_gate = asyncio.Event()  # answers wait for it before their report
        self.report_gate.set()

    async def answer(self, call: ForwardedCall) -> AsyncGenerator[Item, None]:
        """Yield an answer, or raise `ReplicaDiedError`."""
        self.routing.open(call.number)
        name = self.routing.choose(call, self.balancer.names)
        if name is None:
            raise ReplicaDiedError(None)
        self.answered.append(name)
        try:
            if self.fails:
                raise ZeroDivisionError
            left = self.dies_after.get(name, 99)
            items: list[Item] = [Head(name, 200, self.headers), *EVENTS]
            for number, item in enumerate(items):
                if number >= left:
                    self.routing.died(name)
                    raise ReplicaDiedError(name)
                yield item
                if number == 1:
                    await self.gate.wait()
            if left == len(items):
                self.routing.died(name)
                raise ReplicaDiedError(name)
            await self.report_gate.wait()
            yield Tail(name, CacheReport(len(self.answered), None, call.keys))
        finally:
            self.routing.close(call.number)
            self.ended.append(name)

    async def descriptions(self) -> Sequence[Description]:
        return [Description(name, 1, "fake", 512, 16, 100, b"") for name in self.balancer.names]

    async def metrics(self) -> Sequence[tuple[str, str]]:
        page = '# TYPE a counter\na_total{x="1"} 2.0\nb 3\n'
        return [(name, page) for name in self.balancer.names]
