"""Clients that go away, read slowly, send halves, or are too many. Neighbours do not notice."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from common import LLMEngine, SamplingParams
from milestones.lab.instruments.audit import assert_idle
from tests.conftest import EngineFactory
from tests.helpers.serving import (
    COMPLETE,
    PATIENCE,
    Running,
    Serve,
    call,
    hold_steps,
    parse_events,
    read,
    request_bytes,
)

pytestmark = [pytest.mark.extra("serve"), pytest.mark.one_mode]
only_highest = pytest.mark.since("m5_overlap")


@pytest.mark.parametrize(
    "fields",
    [{}, {"stream": True}, {"prompt": ["a", "b", "c", "d"]}],
    ids=["whole", "stream", "several"],
)
@pytest.mark.parametrize("when", ["queued", "running"])
def test_a_client_that_goes_away(
    fields: dict[str, Any], when: str, make_engine: EngineFactory, serve: Serve
) -> None:
    """All its requests are aborted: nothing runs or waits, and no memory is held (I3)."""
    check_aborted(make_engine(), serve, fields, when)


@pytest.mark.since("m3_paged")
def test_a_client_that_goes_away_between_two_chunks(
    make_engine: EngineFactory, serve: Serve
) -> None:
    engine = make_engine(max_num_batched_tokens=64)
    check_aborted(engine, serve, {"prompt": "x" * 300, "stream": True}, "running")


def check_aborted(engine: LLMEngine, serve: Serve, fields: dict[str, Any], when: str) -> None:
    """Let a client go away while its requests wait or run."""
    release = hold_steps(engine)
    run = serve(engine)
    connection = run.open(COMPLETE, call(max_tokens=200, ignore_eos=True, **fields))
    run.wait_until(lambda: bool(run.api.engine._boxes))
    if when == "running":
        release()
        run.wait_until(lambda: run.in_engine(lambda e: e.stats()).num_steps >= 3)
    connection.close()
    run.wait_until(lambda: run.api.open.count == 0)
    release()
    run.wait_until(run.is_idle)
    run.in_engine(assert_idle)
    found = run.metrics()
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert 'request_success_total{finished_reason="abort"' in run.get("/metrics")[1]


@only_highest
def test_a_slow_reader_gets_the_whole_text_and_delays_no_other(
    make_engine: EngineFactory, serve: Serve
) -> None:
    """Its unread outputs are merged: the server holds one output and the bytes of a buffer."""
    expected = make_engine().generate(
        "Hello", SamplingParams(max_tokens=480, temperature=0, ignore_eos=True)
    )[0]
    run = serve()
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.settimeout(PATIENCE)
    slow.connect(("127.0.0.1", run.port))
    body = call(max_tokens=480, ignore_eos=True, stream=True, logprobs=20)
    slow.sendall(request_bytes(COMPLETE, json.dumps(body).encode()))
    run.wait_until(lambda: bool(run.api.engine._boxes))
    (box,) = set(run.api.engine._boxes.values())
    other = run.post(COMPLETE, call(max_tokens=480, ignore_eos=True))
    assert other[1]["choices"][0]["text"] == expected.outputs[0].text
    run.wait_until(lambda: not box.unfinished)  # the engine has finished it, unread
    assert len(box._newest) <= 1
    events = parse_events(without_chunks(read(slow, b"\r\n0\r\n\r\n")))
    choices = [event["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == expected.outputs[0].text
    assert sum(len(c["logprobs"]["tokens"]) for c in choices if c["logprobs"]) == 480
    assert events[-1] == "[DONE]"


def without_chunks(data: bytes) -> str:
    """Return the body of an answer with `Transfer-Encoding: chunked`."""
    rest = data.partition(b"\r\n\r\n")[2]
    parts: list[bytes] = []
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if int(size, 16) == 0:
            return b"".join(parts).decode()
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]


@only_highest
def test_half_requests(serve: Serve) -> None:
    """A body that never ends gets status 408; a call that is cut off holds nothing."""
    run = serve(body_timeout=0.2)
    half = request_bytes(COMPLETE, b'{"prompt": "x', length=1000)
    with run.send(half) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
    run.send(half).close()
    with run.send(half[:30]) as silent, run.send(b"\x16\x03\x01 no http\r\n\r\n") as other:
        assert other.recv(100).startswith(b"HTTP/1.1 400 ")
        assert run.post(COMPLETE, call())[0] == 200
        silent.sendall(half[30:])
        assert silent.recv(100).startswith(b"HTTP/1.1 408 ")
    assert run.api.open.count == 0


@only_highest
def test_a_full_queue_answers_429(make_engine: EngineFactory, serve: Serve) -> None:
    """The official client raises `RateLimitError`; with a place free, it is served again."""
    import openai

    engine = make_engine()
    release = hold_steps(engine)
    run = serve(engine, max_open_requests=3)
    waiting = [run.open(COMPLETE, call(stream=True)) for _ in range(3)]
    run.wait_until(lambda: len(run.api.engine._boxes) == 3)
    for stream in (False, True):
        status, answer, headers = run.post(COMPLETE, call(stream=stream))
        assert status == 429 and answer["error"]["code"] == "queue_full"
        assert int(headers["retry-after"]) >= 1
    with pytest.raises(openai.RateLimitError):
        run.client().completions.create(**call())
    status, answer, _ = run.post(COMPLETE, call(prompt=["a"] * 4))
    assert status == 400 and "limit is 3" in answer["error"]["message"]
    release()
    run.wait_until(run.is_idle)
    assert run.post(COMPLETE, call())[0] == 200
    for connection in waiting:
        connection.close()


@only_highest
def test_a_thousand_connections(serve: Serve) -> None:
    """Each gets an answer: served, or refused because the queue is full."""
    run = serve(max_open_requests=1000)
    expected = run.post(COMPLETE, call(max_tokens=2))[1]["choices"]
    connections = [run.open(COMPLETE, call(max_tokens=2)) for _ in range(1000)]
    answers = [read(connection, b"}}}") for connection in connections]
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
    bodies = [json.loads(answer.partition(b"\r\n\r\n")[2]) for answer in answers]
    assert all(body["choices"] == expected for body in bodies)


def test_clients_of_all_kinds_at_once(make_engine: EngineFactory, serve: Serve) -> None:
    """A third leaves early, some send bad calls; the others get the tokens they get alone."""
    params = [SamplingParams(max_tokens=4 + i, temperature=0.8, seed=i) for i in range(24)]
    prompts = [f"prompt {i % 5} " * (1 + i % 3) for i in range(24)]
    expected = make_engine().generate(prompts, params)
    run: Running = serve(make_engine(max_num_seqs=6, max_num_batched_tokens=64))

    def body(i: int) -> dict[str, Any]:
        return call(prompt=prompts[i], max_tokens=4 + i, temperature=0.8, seed=i)

    def visit(i: int) -> None:
        if i % 3 == 0:
            connection = run.open(COMPLETE, {**body(i), "max_tokens": 300, "stream": True})
            if i % 2:
                connection.recv(100)
            connection.close()
        elif i % 8 == 1:
            assert run.post(COMPLETE, {**body(i), "top_p": 2})[0] == 400
        elif i % 2:
            events = run.events(COMPLETE, body(i))
            text = "".join(event["choices"][0]["text"] for event in events[:-1])
            assert text == expected[i].outputs[0].text
        else:
            (choice,) = run.post(COMPLETE, body(i))[1]["choices"]
            assert choice["text"] == expected[i].outputs[0].text

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(visit, range(24)))
    run.wait_until(run.is_idle)
    run.in_engine(assert_idle)


@only_highest
def test_health_answers_while_a_long_prompt_is_read(serve: Serve) -> None:
    """Tokenizing holds neither the event loop nor the engine: a stream goes on meanwhile."""
    run = serve()
    gate, entered = threading.Event(), threading.Event()
    tokenize = run.api.prompts._inputs.tokenize

    def slow(prompt: Any, **more: Any) -> Any:
        entered.set()
        assert prompt != "slow" or gate.wait(PATIENCE)
        return tokenize(prompt, **more)

    run.api.prompts._inputs.tokenize = slow
    with run.open(COMPLETE, call(prompt="slow")) as connection:
        assert entered.wait(PATIENCE)
        assert run.get("/health") == (200, {"status": "ok"})
        tokens = [40, 41]
        ids = run.in_loop(_generated(run, tokens))
        assert ids == 4
        gate.set()
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


async def _generated(run: Running, tokens: list[int]) -> int:
    """Run a request that needs no tokenizer, beside the API. Return its number of tokens."""
    import time

    from common import TokensPrompt
    from milestones.serving.server.engine_thread import EngineRequest

    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    request = EngineRequest("own", TokensPrompt(tokens), params, time.perf_counter())
    box = await run.api.engine.open([request])
    count = 0
    async for outputs in box.outputs():
        count = len(outputs[-1].outputs[0].token_ids)
    return count
