"""A server in this process, and clients for its tests. Tests import `serve_fixture`."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from common import EngineConfig, LLMEngine, LoadedModel, load_model
from milestones.serving.server.settings import ServerSettings
from tests.conftest import EngineFactory

if TYPE_CHECKING:
    from milestones.serving.server.run import Server

MODEL = "tiny-llama"
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
PATIENCE = 60.0  # seconds: a test fails after them; none of them decides a test that passes


@functools.cache
def long_model() -> LoadedModel:
    """Return a tiny model with more positions: a prompt with tools is long in bytes."""
    loaded = load_model(EngineConfig(model=MODEL, device="cpu"))
    loaded.model.config.max_position_embeddings = 4096
    return loaded


def call(**fields: Any) -> dict[str, Any]:
    """Return the body of a greedy completion."""
    return {"model": MODEL, "prompt": "Hello", "max_tokens": 16, "temperature": 0, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    """Return the body of a greedy chat."""
    body = call(messages=[{"role": "user", "content": "Hello"}], **fields)
    del body["prompt"]
    return body


def hold_steps(engine: LLMEngine) -> Callable[[], None]:
    """Let the engine wait in its next steps until the returned function is called."""
    gate, step = threading.Event(), engine.step

    def held() -> Any:
        assert gate.wait(PATIENCE)
        return step()

    engine.step = held  # type: ignore[method-assign]
    return gate.set


def read(connection: socket.socket, until: bytes | None = None) -> bytes:
    """Return what a server sends, up to these bytes or to its end, and close the connection."""
    data = b""
    with connection:
        while until is None or until not in data:
            piece = connection.recv(65536)
            assert piece or until is None, f"the server closed the connection before {until!r}"
            if not piece:
                break
            data += piece
    return data


class Running:
    """A running server."""

    def __init__(self, server: Server, engine: LLMEngine) -> None:
        self.server = server
        self.engine = engine
        self.port: int = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    @property
    def api(self) -> Any:
        return self.server.api

    def client(self, **options: Any) -> Any:
        """Return the official client."""
        from openai import OpenAI

        return OpenAI(base_url=self.url, **{"api_key": "none", "max_retries": 0, **options})

    def async_client(self) -> Any:
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0)

    def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Send a body, as JSON if it is not bytes. Return the status, the answer, the headers."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = {"Content-Type": "application/json", **(headers or {})}
        return self.call("POST", path, data, head)

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        return self.call("GET", path, None, headers or {})[:2]

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name; the last one of those with the same name."""
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self.get("/metrics")[1])
        return {sample.name: sample.value for family in families for sample in family.samples}

    def call(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> tuple[int, Any, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            text = response.read().decode()
            is_json = response.getheader("content-type") == "application/json"
            answer = json.loads(text, parse_constant=_refuse) if is_json and text else text
            return response.status, answer, {k.lower(): v for k, v in response.getheaders()}
        finally:
            connection.close()

    def open(self, path: str, body: dict[str, Any]) -> socket.socket:
        """Send a call and return the socket without reading the answer."""
        return self.send(request_bytes(path, json.dumps(body).encode()))

    def send(self, data: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        connection.sendall(data)
        return connection

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Return the events of a stream: JSON, and `[DONE]` as a string."""
        status, text, headers = self.post(path, {**body, "stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
        return parse_events(text)

    def in_engine(self, function: Callable[[LLMEngine], Any]) -> Any:
        """Run a function between two steps."""
        return self.in_loop(self.api.engine.call(function))

    def in_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.server.loop).result(PATIENCE)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that must become true."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "the condition did not become true"
            time.sleep(0.005)

    def is_idle(self) -> bool:
        """Return whether no request is open, in the server and in the engine."""
        busy = self.in_engine(lambda engine: engine.has_unfinished_requests())
        return not busy and self.api.open.count == 0 and not self.api.engine._boxes


def _refuse(constant: str) -> None:
    raise ValueError(f"not JSON: {constant}")


def request_bytes(path: str, body: bytes, length: int | None = None) -> bytes:
    """Return a call of HTTP/1.1 with a length that may be wrong."""
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {size}\r\n\r\n".encode() + body


def parse_events(text: str) -> list[Any]:
    """Return the events of a stream. Each must be one line `data: ...` and a blank line."""
    assert text.endswith("\n\n") and text.isascii()
    found = []
    for event in text[:-2].split("\n\n"):
        assert event.startswith("data: ") and "\n" not in event and "\r" not in event, event
        data = event.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data, parse_constant=_refuse))
    return found


@contextmanager
def running(
    engine: LLMEngine, beside: LLMEngine | None = None, **settings: Any
) -> Iterator[Running]:
    """Run a server in a thread. At the end it must stop, and leave no thread and no request."""
    from milestones.serving.server.run import Server

    before = set(threading.enumerate())
    server = Server(
        engine, ServerSettings(port=0, **{"drain_timeout": 0.0, **settings}), beside=beside
    )
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.002)
    run = Running(server, engine)
    try:
        yield run
        if run.api.engine.is_alive:
            run.wait_until(run.is_idle)
    finally:
        if thread.is_alive():
            server.loop.call_soon_threadsafe(server._start_draining)
        thread.join(PATIENCE)
    left = {t for t in set(threading.enumerate()) - before if t.name != "forward"}
    assert not left, f"I3: threads are left: {left}"


Serve = Callable[..., Running]


@pytest.fixture(name="serve")
def serve_fixture(make_engine: EngineFactory) -> Iterator[Serve]:
    """`serve(engine, **settings)` runs a server; the default engine is that of the milestone."""
    with ExitStack() as stack:

        def start(engine: LLMEngine | None = None, **settings: Any) -> Running:
            return stack.enter_context(running(engine or make_engine(), **settings))

        yield start
