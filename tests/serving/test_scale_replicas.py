"""Real replicas under Ray Serve.

All checks are one test: Ray and two replicas take half of its time to start, and the workers of
pytest would start them once each.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

import psutil
import pytest

from common import EngineConfig, SamplingParams, TokensPrompt
from tests.conftest import ROOT, build_engine
from tests.helpers.serving import COMPLETE, MODEL, PATIENCE, Running

pytestmark = [pytest.mark.extra("scale"), pytest.mark.extra("serve")]

PROMPT = [10 + i % 90 for i in range(100)]


class RunningFront(Running):
    """A front with two replicas, in a thread of this process."""

    def __init__(self, server: Any) -> None:
        self.front = server.front
        self.port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def balancer(self) -> Any:
        return self.front.replicas.balancer

    def replicas(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.get("/replicas")[1]["replicas"]
        return rows

    def settle(self) -> None:
        """Wait for the last items of all answers: a client has its answer before the report."""
        self.wait_until(lambda: set(self.balancer.loads.values()) == {0})

    def complete(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
        status, answer, _ = self.post(COMPLETE, body)
        assert status == 200, answer
        found: dict[str, Any] = answer
        return found


@contextmanager
def running_front() -> Iterator[RunningFront]:
    """Run a front. When it has stopped, no process of Ray may be left."""
    from milestones.serving.scale.serve import prepare

    prepare(None)
    from milestones.serving.scale import real

    before = {process.pid for process in psutil.Process().children(recursive=True)}
    config = EngineConfig(model=MODEL, device="cpu")
    with real.running_front("m5_overlap", config, 2) as (server, _):
        yield RunningFront(server)
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=PATIENCE)
    assert not alive, "processes of Ray are left"


def answers_are_those_of_one_engine(front: RunningFront) -> None:
    engine = build_engine("m5_overlap", MODEL)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    expected = engine.generate([TokensPrompt(PROMPT)], params)[0].outputs[0].text
    engine.close()
    answers = [front.complete(PROMPT) for _ in range(2)]
    assert [answer["choices"][0]["text"] for answer in answers] == [expected, expected]
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached == [0, 96], "the second one went to the replica that has the prefix"
    stream = front.post(COMPLETE, {"prompt": PROMPT, "max_tokens": 8, "stream": True})
    assert stream[0] == 200 and stream[1].count("data: [DONE]") == 1
    assert stream[2]["content-type"].startswith("text/event-stream")
    assert front.post(COMPLETE, {"prompt": PROMPT, "max_tokens": -1})[0] == 400
    assert front.get("/nothing")[0] == 404
    front.settle()


def reports_correct_the_router(front: RunningFront) -> None:
    """The pages of an output are in a replica's cache, and only its report can say so."""
    from milestones.serving.scale.prefix_index import page_keys

    prompt = [150 + i % 40 for i in range(40)]
    index, keys = front.balancer.index, page_keys(prompt, 16)
    for _ in range(2):  # the engine keeps the pages of an output one step after its end
        front.complete(prompt, max_tokens=40, ignore_eos=True)
        front.settle()
    assert sorted(index.matches(keys).values()) == [2]
    (holder,) = index.matches(keys)
    sent = {*keys, *page_keys(PROMPT, 16)}
    assert len(index.keys(holder) - sent) >= 2, "pages of the output"


def metrics_of_all_replicas(front: RunningFront) -> None:
    page = front.get("/metrics")[1]
    names = {row["name"] for row in front.replicas()}
    assert len(names) == 2 and all(f'replica="{name}"' in page for name in names)
    assert page.count("# TYPE vllm:num_requests_running gauge") == 1
    assert front.get("/health") == (200, {"status": "ok"})


def all_processes_listen_on_this_machine_only(front: RunningFront) -> None:
    me = psutil.Process()
    listening = {
        (process.name(), connection.laddr.ip)
        for process in [me, *me.children(recursive=True)]
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(listening) > 3
    assert {ip.removeprefix("::ffff:") for _, ip in listening} == {"127.0.0.1"}, listening


def a_client_that_goes_away_is_noticed(front: RunningFront) -> None:
    """The request of the replica ends, and the load of the router falls."""
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    stream = front.open(COMPLETE, body)
    assert stream.recv(100)
    stream.close()
    front.settle()
    front.wait_until(lambda: "} 1.0" not in running(front))


def running(front: RunningFront) -> str:
    lines = front.get("/metrics")[1].splitlines()
    return "\n".join(line for line in lines if line.startswith("vllm:num_requests_running"))


def replicas_are_killed_under_load(front: RunningFront) -> None:
    """SIGKILL, three times: each stream has one end, no answer comes twice, no count is left."""
    from milestones.serving.scale.real import kill_under_load

    ends = asyncio.run(kill_under_load(front.url, MODEL, times=3))
    assert len(set(ends.killed)) == 3
    assert ends.wrong == 0, ends.streams
    assert ends.streams["complete"] > 0
    assert not set(ends.killed) & set(front.balancer.names), "a dead replica is in the router"
    front.settle()
    assert front.complete(PROMPT)["choices"][0]["finish_reason"] == "length"


@pytest.mark.thorough("it starts Ray and engines in processes")
def test_real_replicas() -> None:
    with running_front() as front:
        for check in CHECKS:
            check(front)


@pytest.mark.thorough("it starts Ray, and kills the process that controls it")
def test_the_end_of_the_control_process_is_said() -> None:
    """`/health` shows it, an open stream ends whole, and the command says why it has ended."""
    command = [sys.executable, "-m", "milestones", "serve", "m5", "--model", "tiny-llama"]
    options = ["--replicas", "1", "--port", "0", "--emulated-forward-ms", "40"]
    process = subprocess.Popen(
        [*command, *options], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "serve" in line)
        url = re.findall(r"http://[\d.:]+", line)[0]
        body = json.dumps({"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True})
        head = {"Content-Type": "application/json"}
        stream = urlopen(UrlRequest(f"{url}/v1/completions", body.encode(), head), timeout=60)
        first = stream.readline()
        (control,) = [
            child for child in psutil.Process(process.pid).children(recursive=True)
            if child.name() == "gcs_server"
        ]  # fmt: skip
        control.kill()
        assert first and stream.read().endswith(b"data: [DONE]\n\n"), "a stream was cut off"
        with pytest.raises((HTTPError, OSError)):  # 503, or the server has ended
            while True:
                urlopen(f"{url}/health", timeout=60)
                time.sleep(0.2)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1, (out, err)
        assert "control process (GCS)" in out and "Start the server again" in out.replace("\n", " ")
    finally:
        process.kill()
        process.communicate()


def test_a_cluster_that_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself names neither the token, which `ray start` asks for, nor the variable."""
    import ray

    from milestones.serving.scale.ray_replicas import connect
    from milestones.serving.scale.settings import ScaleSettings

    def refuse(**options: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(RuntimeError, match=r"at 10\.0\.0\.1:6379 .* RAY_AUTH_MODE=token"):
        connect(ScaleSettings(replicas=1, address="10.0.0.1:6379"))


CHECKS = (
    answers_are_those_of_one_engine,
    reports_correct_the_router,
    metrics_of_all_replicas,
    all_processes_listen_on_this_machine_only,
    a_client_that_goes_away_is_noticed,
    replicas_are_killed_under_load,
)
