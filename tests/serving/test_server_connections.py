"""Connections that send nothing, and clients that read nothing: others are answered meanwhile."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.conftest import EngineFactory
from tests.helpers.serving import (
    COMPLETE,
    PATIENCE,
    Running,
    Serve,
    call,
    hold_steps,
    request_bytes,
)

pytestmark = [
    pytest.mark.extra("serve"),
    pytest.mark.since("m5_overlap"),
    pytest.mark.one_mode,
]


def ended(connection: socket.socket) -> bool:
    """Wait until the server closes a connection."""
    with connection:
        connection.settimeout(PATIENCE)
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True


def test_idle_connections_do_not_shut_others_out(serve: Serve) -> None:
    """Fifty clients connect and send nothing. Every call is answered."""
    run = serve(max_connections=5)
    idle = [run.send(b"") for _ in range(50)]
    for _ in range(3):
        assert run.get("/v1/models")[0] == run.get("/health")[0] == 200
        assert run.post(COMPLETE, call(max_tokens=1))[0] == 200
    for connection in idle:
        connection.close()


def test_calls_above_the_limit_are_told_so(make_engine: EngineFactory, serve: Serve) -> None:
    """In the format of all errors, with a time to try again. `/health` is answered in any case."""
    engine = make_engine()
    release = hold_steps(engine)
    run = serve(engine, max_connections=2)
    streams = [run.open(COMPLETE, call(stream=True)) for _ in range(2)]
    run.wait_until(lambda: run.api.open.count == 2)
    status, answer, headers = run.post(COMPLETE, call())
    assert status == 503 and answer["error"]["code"] == "too_many_connections"
    assert headers["retry-after"] == "1" and run.get("/health")[0] == 200
    release()
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("start", [b"", b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_a_header_must_come_in_time(start: bytes, serve: Serve) -> None:
    run = serve(header_timeout=0.05)
    assert ended(run.send(start))
    answered = run.send(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert answered.recv(100).startswith(b"HTTP/1.1 200")
    answered.sendall(b"GET /health")  # the next header of the same connection
    while answered.recv(100):
        pass
    answered.close()


def fill(run: Running, **fields: Any) -> socket.socket:
    """Let a client ask for a long answer, and read nothing of it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.connect(("127.0.0.1", run.port))
    body = call(stream=True, ignore_eos=True, **fields)
    connection.sendall(request_bytes(COMPLETE, json.dumps(body).encode()))
    return connection


def test_a_client_that_does_not_read_gives_its_places_back(serve: Serve) -> None:
    """As soon as the engine has finished: the text is bounded, and the places are for others."""
    run = serve(max_open_requests=8)
    silent = fill(run, n=8, temperature=1.0, max_tokens=400, logprobs=5)
    run.wait_until(lambda: run.api.open.count == 8)
    run.wait_until(lambda: run.api.open.count == 0)
    assert run.post(COMPLETE, call(n=8, temperature=1.0, max_tokens=2))[0] == 200
    silent.close()


def test_a_client_that_does_not_read_is_cut_off(serve: Serve) -> None:
    run = serve(write_timeout=0.2)
    silent = fill(run, n=8, temperature=1.0, max_tokens=400, logprobs=5)
    run.wait_until(lambda: run.api.open.count == 8)
    run.wait_until(lambda: not run.server.server_state.tasks)
    assert run.api.engine._boxes == {}
    silent.close()


def test_the_bodies_of_all_calls_have_one_limit(serve: Serve) -> None:
    run = serve(max_buffered_bytes=100_000)
    slow = [run.send(request_bytes(COMPLETE, b" " * 40_000, length=50_000)) for _ in range(2)]
    large = b" " * 30_000 + json.dumps(call()).encode()
    run.wait_until(lambda: run.post(COMPLETE, large)[0] == 503)  # both bodies have been read
    status, answer, headers = run.post(COMPLETE, large)
    assert status == 503 and answer["error"]["code"] == "too_many_bytes"
    assert headers["retry-after"] == "1"
    for connection in slow:
        connection.close()
    run.wait_until(lambda: run.post(COMPLETE, large)[0] == 200)


def test_tokenize_has_a_place_and_drains(serve: Serve) -> None:
    run = serve(max_open_requests=3)
    with run.api.open.place_for(3):
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            status, answer, _ = run.post(path, body)
            assert status == 429 and answer["error"]["code"] == "queue_full"
    assert run.post("/tokenize", {"prompt": "x"})[0] == 200
    run.api.open.is_draining = True
    assert run.post("/tokenize", {"prompt": "x"})[0] == 503
    run.api.open.is_draining = False
