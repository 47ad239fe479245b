"""The start, the end and the failure of a server; metrics; the thread of the engine."""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from common import EngineDeadError, RequestOutput
from common.tracing.forced_retractions import force_retractions
from tests.conftest import ROOT, EngineFactory
from tests.helpers.serving import COMPLETE, MODEL, PATIENCE, Serve, call, hold_steps, read

pytestmark = [
    pytest.mark.extra("serve"),
    pytest.mark.since("m5_overlap"),
    pytest.mark.one_mode,
]


def test_metrics_count_what_happened(serve: Serve) -> None:
    run = serve()
    run.post(COMPLETE, call(prompt="a" * 40, max_tokens=5, ignore_eos=True))
    run.post(COMPLETE, call(prompt=["a" * 40, "b"], max_tokens=3, ignore_eos=True))
    found = run.metrics()
    assert found["vllm:generation_tokens_total"] == 11
    assert found["vllm:prompt_tokens_total"] == 81
    assert found["vllm:prefix_cache_queries_total"] == 81
    assert found["vllm:prefix_cache_hits_total"] == 32
    assert found["vllm:time_to_first_token_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_count"] == 8
    assert found["vllm:e2e_request_latency_seconds_count"] == 3
    assert found["vllm:request_success_total"] == 3
    assert found["vllm:kv_cache_usage_perc"] == 0
    stats = run.in_engine(lambda engine: engine.stats())
    assert found["ladder:num_steps_total"] == stats.num_steps > 0
    assert found["ladder:kv_pages_cached"] == stats.kv_pages_cached > 0


def test_the_first_token_is_recorded_once(make_engine: EngineFactory, serve: Serve) -> None:
    """Once for each request: also with three outputs, and after retractions."""
    engine: Any = make_engine(page_size=4, num_pages=24)
    force_retractions(engine.core.scheduler, 3)
    run = serve(engine)
    body = call(n=3, temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    assert run.post(COMPLETE, body)[0] == 200
    found = run.metrics()
    assert found["vllm:num_preemptions_total"] > 0
    assert found["vllm:time_to_first_token_seconds_count"] == 1
    assert found["vllm:generation_tokens_total"] == 36
    assert found["vllm:prompt_tokens_total"] == 5


def test_an_engine_that_fails_ends_every_call(make_engine: EngineFactory, serve: Serve) -> None:
    """Open calls get an error, /health is 503, and new calls fail at once instead of hanging."""
    engine = make_engine()
    release = hold_steps(engine)
    held = engine.step

    def failing() -> list[RequestOutput]:
        held()
        raise AssertionError("I3: planted")

    engine.step = failing  # type: ignore[method-assign]
    run = serve(engine)
    stream = run.open(COMPLETE, call(stream=True))
    answers: list[Any] = []
    whole = threading.Thread(target=lambda: answers.append(run.post(COMPLETE, call())))
    whole.start()
    run.wait_until(lambda: len(run.api.engine._boxes) == 2)
    release()
    whole.join(PATIENCE)
    assert answers[0][0] == 503 and "planted" in answers[0][1]["error"]["message"]
    text = read(stream, b"planted")
    assert b'data: {"error"' in text and b"[DONE]" not in text
    assert run.get("/health")[0] == 503
    for stream_too in (False, True):
        assert run.post(COMPLETE, call(stream=stream_too))[0] == 503
    assert run.get("/metrics")[0] == 200
    run.wait_until(lambda: run.api.open.count == 0)


def test_a_server_drains(make_engine: EngineFactory, serve: Serve) -> None:
    """New calls get 503 at once, open streams go on to their end, and then the server stops."""
    engine = make_engine()
    release = hold_steps(engine)
    run = serve(engine, drain_timeout=PATIENCE)
    stream = run.open(COMPLETE, call(stream=True))
    run.wait_until(lambda: bool(run.api.engine._boxes))
    run.server.handle_exit(signal.SIGTERM, None)
    assert run.get("/health") == (503, {"status": "draining"})
    status, answer, _ = run.post(COMPLETE, call())
    assert status == 503 and answer["error"]["code"] == "shutting_down"
    release()
    text = read(stream)
    assert b"data: [DONE]" in text and b"error" not in text
    run.wait_until(lambda: not run.api.engine.is_alive)


def test_the_deadline_of_a_drain(make_engine: EngineFactory, serve: Serve) -> None:
    """What is left at the deadline gets an error as its last event."""
    engine = make_engine()
    release = hold_steps(engine)
    run = serve(engine, drain_timeout=0.0)
    stream = run.open(COMPLETE, call(stream=True))
    run.wait_until(lambda: bool(run.api.engine._boxes))
    run.server.handle_exit(signal.SIGTERM, None)
    assert b"[DONE]" not in read(stream, b"shut down")
    release()
    run.wait_until(lambda: not run.api.engine.is_alive)


def start_process(*options: str) -> tuple[subprocess.Popen[str], int]:
    """Start the command on a free port, and return the process and the port."""
    command = [sys.executable, "-m", "milestones", "serve", "m5", "--model", MODEL, "--port", "0",
               "--device", "cpu", *options]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", process.stdout.readline())
    assert found is not None
    return process, int(found[1])


def test_signals_end_the_command() -> None:
    """SIGTERM drains and exits with 0. A second one ends the process, whatever is open."""
    process, _port = start_process()
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    process, port = start_process("--emulated-forward-ms", "2000", "--drain-timeout", "1000")
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(**call(max_tokens=400), stream=True)
    process.send_signal(signal.SIGTERM)
    try:
        while client.models.list():  # until the drain has begun, this works
            client.completions.create(**call(max_tokens=1))
    except openai.InternalServerError as error:
        assert error.status_code == 503
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    stream.close()
    client.close()


def test_no_command_runs_during_a_step(make_engine: EngineFactory, serve: Serve) -> None:
    """One thread calls the engine. A step and the calls of 32 tasks never overlap."""
    engine, inside, threads = make_engine(), [0], set()
    for name in ("step", "add_request", "abort_request", "stats"):
        method = getattr(engine, name)

        def watched(*args: Any, method: Any = method) -> Any:
            assert inside[0] == 0 or threading.current_thread() in threads
            inside[0] += 1
            threads.add(threading.current_thread())
            try:
                return method(*args)
            finally:
                inside[0] -= 1

        setattr(engine, name, watched)
    run = serve(engine)

    async def visit(client: Any, i: int) -> None:
        if i % 3 == 0:
            await run_scrape()
        stream = await client.completions.create(**call(prompt=f"{i}"), stream=True)
        async for _ in stream:
            if i % 4 == 0:
                break
        await stream.close()

    async def run_scrape() -> None:
        assert (await asyncio.to_thread(run.get, "/metrics"))[0] == 200

    async def all_visits() -> None:
        async with run.async_client() as client:
            await asyncio.gather(*(visit(client, i) for i in range(32)))

    asyncio.run(all_visits())
    run.wait_until(run.is_idle)
    assert [thread.name for thread in threads] == ["engine"]


def test_commands_do_not_stop_the_steps(serve: Serve) -> None:
    """A command that queues itself again runs once between two steps, and requests go on."""
    run, running = serve(), [True]

    def again(engine: Any) -> None:
        if running[0]:
            run.api.engine._commands.put((again, Future()))

    run.api.engine._commands.put((again, Future()))
    try:
        assert run.post(COMPLETE, call())[0] == 200
    finally:
        running[0] = False


def test_idle_connections_outlive_those_of_clients(serve: Serve) -> None:
    """A client that uses an idle connection again after 30 s must not find it closed."""
    run = serve()
    assert run.server.config.timeout_keep_alive > 30
    connection = http.client.HTTPConnection("127.0.0.1", run.port, timeout=PATIENCE)
    for _ in range(3):
        connection.request("GET", "/health")
        response = connection.getresponse()
        assert response.status == 200 and response.getheader("connection") != "close"
        response.read()
    connection.close()


def test_a_call_after_the_failure_raises(make_engine: EngineFactory, serve: Serve) -> None:
    """Also one that waits in the queue when the engine fails: none hangs."""
    engine = make_engine()
    run = serve(engine)

    def fail(engine: Any) -> None:
        engine.has_unfinished_requests = lambda: 1 / 0

    run.in_engine(fail)
    run.wait_until(lambda: not run.api.engine.is_alive)
    with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
        run.in_engine(lambda engine: None)
    run.in_loop(_restore(engine))


async def _restore(engine: Any) -> None:
    del engine.has_unfinished_requests


def test_the_environment_gives_the_key(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_LADDER_API_KEY", "from outside")
    run = serve()
    assert run.get("/v1/models")[0] == 401
    assert run.get("/v1/models", {"Authorization": "Bearer from outside"})[0] == 200
    assert os.environ["LLM_LADDER_API_KEY"] == "from outside"
