"""The front: each call has one answer, and each answer has an end. Its replicas are fakes."""

from __future__ import annotations

import asyncio
import functools
import json
import pickle
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import pytest

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
from milestones.serving.server.settings import ServerSettings

if TYPE_CHECKING:
    from milestones.serving.scale.front import Front

pytestmark = pytest.mark.extra("serve")

EVENTS = (b"data: one\n\n", b"data: two\n\n", b"data: [DONE]\n\n")
STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"),)
WHOLE = b"".join(EVENTS)
BODY = {"prompt": [*range(40)], "stream": True}


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


def front_of(replicas: Any, **settings: Any) -> Front:
    from milestones.serving.scale.front import Front, PromptKeys

    described = Description("a", 1, "fake", 512, 16, 100, pickle.dumps(None))
    return Front(replicas, ServerSettings(**settings), PromptKeys(described))


async def post(
    front: Front,
    body: Any = BODY,
    sends: list[Any] | None = None,
    leaves: asyncio.Event | None = None,
) -> tuple[int, bytes]:
    """Send a call to the application, and return the status and the body of the answer.

    sends: gets all messages. leaves: when it is set, the client closes the connection.
    """
    sent = [] if sends is None else sends
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await (leaves or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
        "headers": [], "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 1),
        "raw_path": b"/v1/completions", "root_path": "", "asgi": {"version": "3.0"},
    }  # fmt: skip
    await front.app()(scope, receive, send)
    starts = [message for message in sent if message["type"] == "http.response.start"]
    assert len(starts) == 1, "an answer begins once"
    bodies = [message for message in sent if message["type"] == "http.response.body"]
    assert not bodies[-1].get("more_body"), "an answer has an end"
    return starts[0]["status"], b"".join(message.get("body", b"") for message in bodies)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Let a test run in an event loop, and fail after 30 seconds."""

    @functools.wraps(test)
    def run(**values: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**values), 30))

    return run


@in_a_loop
async def test_an_answer_passes_through() -> None:
    replicas = FakeReplicas(["a", "b"])
    front = front_of(replicas)
    assert await post(front) == (200, WHOLE)
    assert set(replicas.balancer.loads.values()) == {0} and front.open.count == 0
    (first,) = replicas.answered
    for _ in range(5):  # the prompt has two whole pages, which the router has seen
        await post(front)
    assert set(replicas.answered) == {first}


@in_a_loop
async def test_a_call_is_sent_again_if_nothing_was_sent_to_the_client() -> None:
    """Two of three replicas die after the head, which the client has not got yet."""
    replicas = FakeReplicas(["a", "b", "c"], policy="round-robin")
    replicas.dies_after = {"b": 0, "a": 1}
    front = front_of(replicas)
    assert await post(front) == (200, WHOLE)
    assert replicas.answered == ["b", "a", "c"]
    assert replicas.balancer.loads == {"c": 0}
    assert front.calls.retried == 2


@pytest.mark.parametrize("after", [2, 3])
@in_a_loop
async def test_a_stream_that_has_begun_ends_with_an_error(after: int) -> None:
    """It is not computed again by another replica."""
    replicas = FakeReplicas(["a", "b"])
    replicas.dies_after = {"a": after, "b": after}
    status, body = await post(front_of(replicas))
    *events, last = body.strip().split(b"\n\n")
    assert status == 200 and events == [event.strip() for event in EVENTS[: after - 1]]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == "replica_died" and len(replicas.answered) == 1
    assert len(replicas.balancer.names) == 1, "a dead replica leaves the router at once"


@pytest.mark.parametrize("headers", [None, ((b"content-length", b"36"),)])
@in_a_loop
async def test_a_replica_that_dies_after_the_whole_answer(headers: Any) -> None:
    """Only its report is lost. The client gets the answer as it is, and nothing after it."""
    assert len(WHOLE) == 36
    replicas = FakeReplicas(["a"])
    replicas.headers = headers or replicas.headers
    replicas.dies_after = {"a": 4}
    assert await post(front_of(replicas)) == (200, WHOLE)
    assert replicas.balancer.names == []


@in_a_loop
async def test_all_replicas_are_dead() -> None:
    replicas = FakeReplicas(["a", "b"])
    replicas.dies_after = {"a": 0, "b": 0}
    status, body = await post(front_of(replicas))
    assert status == 502 and json.loads(body)["error"]["code"] == "replica_died"


@in_a_loop
async def test_a_broken_body_is_no_whole_answer() -> None:
    """JSON that has begun cannot get an error: the connection must end before the body does."""
    replicas = FakeReplicas(["a"])
    replicas.headers = ((b"content-type", b"application/json"),)
    replicas.dies_after = {"a": 2}
    sends: list[Any] = []
    with pytest.raises(Exception, match="has died"):
        await post(front_of(replicas), sends=sends)
    assert sends[-1]["more_body"]


@in_a_loop
async def test_a_client_that_goes_away_frees_its_place() -> None:
    replicas = FakeReplicas(["a"])
    replicas.gate.clear()
    front = front_of(replicas)
    call = asyncio.create_task(post(front))
    while not replicas.answered:
        await asyncio.sleep(0.001)
    assert replicas.balancer.loads == {"a": 1} and front.open.count == 1
    call.cancel()
    await asyncio.wait((call,))
    assert replicas.balancer.loads == {"a": 0} and front.open.count == 0
    assert replicas.ended == ["a"]


def shut_down(front: Front) -> None:
    from milestones.serving.server.errors import ApiError

    front.end_all(ApiError(503, "the server has shut down before the end of this answer"))


async def sent_whole(sends: list[Any]) -> None:
    """Wait for the last piece of an answer."""
    while b"".join(message.get("body", b"") for message in sends) != WHOLE:
        await asyncio.sleep(0.001)


@in_a_loop
async def test_a_client_that_goes_away_after_the_whole_answer_does_not_lose_the_report() -> None:
    """A client with `Connection: close` leaves at once. The report of the cache comes later."""
    replicas = FakeReplicas(["a"])
    replicas.report_gate.clear()
    front = front_of(replicas)
    leaves = asyncio.Event()
    sends: list[Any] = []
    call = asyncio.create_task(post(front, sends=sends, leaves=leaves))
    await sent_whole(sends)
    leaves.set()
    for _ in range(10):  # the front sees that the client has gone
        await asyncio.sleep(0)
    replicas.report_gate.set()
    await call
    assert replicas.balancer.reported() == {"a": 1}
    assert replicas.balancer.loads == {"a": 0} and front.open.count == 0


@in_a_loop
async def test_an_answer_that_was_sent_as_a_whole_gets_no_error() -> None:
    """The server shuts down while the report is still to come."""
    replicas = FakeReplicas(["a"])
    replicas.report_gate.clear()
    front = front_of(replicas)
    sends: list[Any] = []
    call = asyncio.create_task(post(front, sends=sends))
    await sent_whole(sends)
    shut_down(front)
    assert await call == (200, WHOLE)
    assert replicas.balancer.loads == {"a": 0}


@in_a_loop
async def test_draining_refuses_new_calls_and_ends_open_ones() -> None:
    replicas = FakeReplicas(["a"])
    replicas.gate.clear()
    front = front_of(replicas)
    call = asyncio.create_task(post(front))
    while not replicas.answered:
        await asyncio.sleep(0.001)
    front.open.is_draining = True
    assert (await post(front))[0] == 503 and len(replicas.answered) == 1
    shut_down(front)
    status, body = await call
    assert status == 200 and b"shut down" in body and b"[DONE]" not in body
    assert replicas.balancer.loads == {"a": 0}


@in_a_loop
async def test_an_answer_that_fails_in_a_replica_is_an_error() -> None:
    """It is not sent again: the next replica would fail in the same way."""
    replicas = FakeReplicas(["a", "b"])
    replicas.fails = True
    front = front_of(replicas)
    status, body = await post(front)
    assert status == 500 and b"the server failed: ZeroDivisionError" in body
    assert len(replicas.answered) == 1 and set(replicas.balancer.loads.values()) == {0}
    assert len(replicas.balancer.names) == 2, "its replica lives"


@in_a_loop
async def test_too_many_open_calls_are_refused() -> None:
    replicas = FakeReplicas(["a", "b"])
    replicas.gate.clear()
    front = front_of(replicas, max_open_requests=2)
    calls = [asyncio.create_task(post(front)) for _ in range(4)]
    while front.open.count < 4:
        await asyncio.sleep(0.001)
    assert (await post(front))[0] == 429
    replicas.gate.set()
    assert {status for status, _ in await asyncio.gather(*calls)} == {200}
    assert front.open.count == 0


def test_the_command_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import argparse

    from milestones.serving import serve

    monkeypatch.setattr(serve, "missing", lambda name: f"extras {name}" if name == "scale" else "")
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    assert serve.main(parser.parse_args(["m5", "--replicas", "2"])) == 2
    assert "extras scale" in capsys.readouterr().out


def test_the_pages_of_all_replicas_become_one() -> None:
    from milestones.serving.scale.front import merged_pages

    page = '# HELP a_x A\n# TYPE a_x counter\na_x_total{m="1"} 2.0\n'
    merged = merged_pages([("r1", page), ("r2", page)], {"r1": 3})
    assert merged.splitlines()[:4] == [
        "# HELP a_x A", "# TYPE a_x counter",
        'a_x_total{replica="r1",m="1"} 2.0', 'a_x_total{replica="r2",m="1"} 2.0',
    ]  # fmt: skip
    assert 'ladder:router_open_requests{replica="r1"} 3' in merged
