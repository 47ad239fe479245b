"""Both sides of `disaggregated` as processes: messages, pages, and processes that are killed."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common import EngineConfig, SamplingParams
from common.engine_core import ForwardError
from milestones.chain import load
from milestones.serving.scale.settings import ScaleSettings
from tests.helpers.shared_models import shared_model

pytestmark = [pytest.mark.extra("serve"), pytest.mark.since("disaggregated")]

CONFIG = EngineConfig(
    model="tiny-qwen3", device="cpu", page_size=4, num_pages=200, max_num_seqs=6,
    max_num_batched_tokens=32,
)  # fmt: skip
PROMPTS = [[5, 6, 7] * 7, [9] * 40, [200, 3], [5, 6, 7] * 7 + [8, 8], [*range(3, 90)]] * 3
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
KILLS = (3, 9, 30)  # the steps before which a process is killed
TRANSFERS = ("shared-memory", "distributed")
SECONDS = 60.0
# Programs in place of a prefill process. Their first argument is the number of their socket.
ENDS = "pass"
SILENT = "import time; time.sleep(600)"
STOPS_IN_A_MESSAGE = f"import os, sys; os.write(int(sys.argv[1]), bytes([0, 0, 9, 9, 1])); {SILENT}"
COUNTS = """
import sys
from multiprocessing.connection import Connection
from common import EngineStats
from milestones.serving.sides.messages import Posted, Report, Transfer
report = Report(EngineStats(num_steps=3, num_running=2), Transfer(10, 1.0, 0.5))
Connection(int(sys.argv[1])).send(Posted(report, 0))
"""


@contextmanager
def two_sides(**settings: Any) -> Iterator[Any]:
    from milestones.serving.sides.engine import LLMEngine

    with LLMEngine(CONFIG, **settings) as engine:
        yield engine


def serve(
    engine: Any, kills: tuple[int, ...] = (), killed: set[int] | None = None
) -> dict[str, Any]:
    """Serve all prompts, with kills of prefill processes. Return the outputs, by request.

    killed: gets the numbers of the killed processes.
    """
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    found = dict[str, Any]()
    steps, end = 0, time.monotonic() + SECONDS
    while engine.has_unfinished_requests():
        assert time.monotonic() < end, f"I5: after {steps} steps, {len(found)} have ended"
        steps += 1
        peer = engine.core.transport.peers[steps % len(engine.core.transport.peers)]
        if steps in kills and peer.pid is not None:
            os.kill(peer.pid, signal.SIGKILL)
            assert killed is not None
            killed.add(peer.pid)
        for output in engine.step():
            if output.finished:
                assert output.request_id not in found, "it is answered twice"
                found[output.request_id] = output.outputs[0]
    return {name: found[name] for name in ids}


def assert_nothing_is_held(engine: Any) -> None:
    """I3, on both sides: the decode side has no stand-in, and no process has an attempt."""
    end = time.monotonic() + SECONDS
    while engine.core.scheduler.stand_ins or engine.core.transport.peer_of:
        assert time.monotonic() < end, "I3: an attempt does not end"
        engine.core.settle()
        engine.core.receiver.receive()
    engine.check_invariants()
    stats = engine.stats()
    assert stats.kv_pages_free + stats.kv_pages_cached == stats.kv_pages_total, f"I3: {stats}"


@pytest.mark.thorough("it starts processes that import torch")
@pytest.mark.parametrize("kv_transfer", TRANSFERS)
def test_answers_are_those_of_one_process_also_after_kills(kv_transfer: str) -> None:
    with load("m5_overlap").LLMEngine(CONFIG) as engine:
        outputs = engine.generate(PROMPTS, GREEDY, progress=False)
        expected = [output.outputs[0].token_ids for output in outputs]
    with two_sides(num_prefill=2, kv_transfer=kv_transfer) as engine:
        assert [one.token_ids for one in serve(engine).values()] == expected
        assert_nothing_is_held(engine)
        assert sum(peer.report.transfer.num_bytes for peer in engine.core.transport.peers) > 0
        engine.reset_prefix_cache()
        killed = set[int]()
        assert [one.token_ids for one in serve(engine, KILLS, killed).values()] == expected
        assert sum(peer.num_deaths for peer in engine.core.transport.peers) == len(killed) > 0
        assert_nothing_is_held(engine)


@pytest.mark.thorough("it starts processes that import torch")
def test_a_process_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    from milestones.serving.sides import peer as module

    monkeypatch.setattr(module, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(load("disaggregated", "receiver"), "HEARTBEAT_SECONDS", 0.25)
    with two_sides() as engine:
        (peer,) = engine.core.transport.peers
        os.kill(peer.pid, signal.SIGSTOP)
        outputs = serve(engine)
        assert {one.finish_reason for one in outputs.values()} == {"length"}
        assert peer.num_deaths == 1
        assert_nothing_is_held(engine)


@pytest.mark.thorough("it starts processes that import torch")
def test_an_abort_in_the_middle_of_a_prompt_frees_both_sides() -> None:
    with two_sides() as engine:
        for prompt in PROMPTS:
            name = engine.add_request(prompt, GREEDY)
            engine.step()
            engine.abort_request(name)
        while engine.has_unfinished_requests():
            engine.step()
        assert_nothing_is_held(engine)


@pytest.fixture
def transport_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that makes a transport with one process."""
    from milestones.serving.sides import peer as module
    from milestones.serving.sides.transport import ProcessTransport

    transport = ProcessTransport()

    def start(program: str | None = None, **config: Any) -> Any:
        """program: in place of a prefill process. None: a real one, which sends its pages."""
        if program is not None:
            monkeypatch.setattr(module, "PROGRAM", ["-c", program])
        pool: Any = SimpleNamespace(keys=[])
        setup = module.Setup(
            replace(CONFIG, **config), pool, transport.windows, None, 1, transport.wake
        )
        transport.peers.append(module.Peer(0, setup))
        return transport

    yield start
    transport.close()


def until(transport: Any, condition: Callable[[], Any]) -> None:
    """Poll until a condition is true."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, transport.peers[0].last_error
        transport.wait(0.05)
        transport.poll()


@pytest.mark.parametrize("program", [SILENT, STOPS_IN_A_MESSAGE])
def test_a_process_that_never_gets_ready_is_killed(
    program: str, transport_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its decode side does not wait, also not for the rest of a message."""
    from milestones.serving.sides import peer as module

    transport = transport_of(program)
    (peer,) = transport.peers
    transport.poll()
    assert peer.pid is not None
    monkeypatch.setattr(module, "START_SECONDS", 0.5)
    until(transport, lambda: peer.num_deaths)
    assert peer.last_error == "prefill process 0 was not ready after 0.5 s"


def test_attempts_wait_while_no_process_runs(
    transport_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I5: processes that cannot start take no attempts. The next one gets them, in order."""
    from milestones.serving.sides import peer as module

    messages = load("disaggregated", "transport")
    transport = transport_of(ENDS)
    (peer,) = transport.peers
    until(transport, lambda: peer.num_deaths)
    assert peer.last_error == "prefill process 0 ended with status 0"
    monkeypatch.setattr(peer, "start_at", float("inf"))
    for attempt in (1, 2):
        transport.send("prefill", messages.Bootstrap(attempt, None, ()))
        transport.send("prefill", messages.Pages(attempt, 0, [attempt]))
    transport.send("prefill", messages.Abort(1))
    transport.send("prefill", messages.Abort(9))
    assert transport.receive("decode") == [messages.End(1, error="it was aborted")]
    monkeypatch.setattr(module, "PROGRAM", ["-c", SILENT])
    peer.start_at = 0.0
    sent: list[Any] = []
    monkeypatch.setattr(peer, "send", sent.append)
    transport.poll()  # it starts a process
    assert [type(message).__name__ for message in sent] == ["Bootstrap", "Pages"]
    assert transport.peer_of == {2: peer} and not transport.waiting


def test_counters_of_processes_that_have_ended_stay(transport_of: Callable[..., Any]) -> None:
    """`/metrics` has counters: one that fell would count twice."""
    transport = transport_of(COUNTS)
    (peer,) = transport.peers
    for number in (1, 2):
        peer.start_at = 0.0
        until(transport, lambda: peer.num_deaths == number)  # noqa: B023
        assert peer.report.stats.num_steps == 3 * number and peer.report.stats.num_running == 2
        assert peer.report.transfer.num_bytes == 10 * number


@pytest.mark.thorough("it starts a process that imports torch")
def test_a_process_that_cannot_start_says_why(transport_of: Callable[..., Any]) -> None:
    transport = transport_of(model="/no/model")
    until(transport, lambda: transport.peers[0].num_deaths)
    error = transport.peers[0].last_error
    assert error.startswith("prefill process 0 could not start: ") and "/no/model" in error


@pytest.mark.thorough("it starts a process that imports torch")
def test_a_process_that_waits_for_its_decode_side_ends_with_it(
    transport_of: Callable[..., Any],
) -> None:
    """Ready, it joins a process group. Its decode side ends, and never joins."""
    from milestones.serving.sides.messages import Posted, Ready

    (peer,) = transport_of(max_model_len=64).peers
    running, end = peer.running, time.monotonic() + SECONDS
    while not running.inbox.messages:
        assert time.monotonic() < end and not running.inbox.is_closed
        time.sleep(0.05)
    assert list(running.inbox.messages) == [Posted(Ready(), 0)]
    ours = running.inbox.connection.fileno()
    with socket.socket(fileno=os.dup(ours)) as connection:
        connection.shutdown(socket.SHUT_RDWR)
    assert running.process.wait(SECONDS) == 0


def test_only_a_failure_of_known_requests_is_searched() -> None:
    from milestones.serving.sides.engine import DecodeCore
    from milestones.serving.sides.messages import ForwardFailed

    core: Any = SimpleNamespace(transport=SimpleNamespace(failures=[]), receiver=SimpleNamespace())
    core.receiver.requests = {1: "a request"}
    core.transport.failures += [ForwardFailed((5,), "", False)]
    DecodeCore.run_prefill(core)  # its requests have ended
    core.transport.failures += [
        ForwardFailed((1, 5), "", False), ForwardFailed((5,), "I3: a page is lost", True)
    ]  # fmt: skip
    with pytest.raises(ForwardError) as one:
        DecodeCore.run_prefill(core)
    assert one.value.requests == ["a request"] and isinstance(one.value.error, RuntimeError)
    with pytest.raises(ForwardError, match="I3: a page is lost") as other:
        DecodeCore.run_prefill(core)
    assert isinstance(other.value.error, AssertionError)


def test_memory_is_shared_and_ends_with_its_pool() -> None:
    from milestones.serving.sides.pages import share

    class Pool:
        def __init__(self, num_layers: int) -> None:
            self.keys = [torch.empty(2, 3, 4, 5) for _ in range(num_layers)]
            half = torch.bfloat16
            self.values = [torch.empty(2, 3, 4, 7, dtype=half) for _ in range(num_layers)]

    mine, other = Pool(2), Pool(0)
    shared = share(mine)  # type: ignore[arg-type]
    shared.open_into(other)
    mine.keys[1].fill_(3)
    mine.values[0].fill_(4)
    other.values[1].fill_(5)
    assert (other.keys[1] == 3).all() and (other.values[0] == 4).all()
    assert (mine.values[1] == 5).all() and not (mine.keys[0] == 3).any()
    assert other.values[1].shape == (2, 3, 4, 7)


def test_a_process_that_reads_nothing_does_not_stop_its_decode_side() -> None:
    """Messages wait here, in their order, until it reads or ends."""
    from milestones.serving.sides.outbox import Outbox

    ours, theirs = socket.socketpair()
    broken = threading.Event()
    outbox = Outbox(Connection(ours.detach()), on_error=broken.set)
    changed = [0]
    for number in range(64):  # far more than a socket holds
        changed[0] = number
        outbox.put((changed, b"x" * 100_000))
    with Connection(theirs.detach()) as reader:
        assert [reader.recv()[0] for _ in range(32)] == [[number] for number in range(32)]
    assert broken.wait(SECONDS), "I5: the thread still writes to a process that has ended"
    outbox.close()
    outbox.connection.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prefill": 1}, "need each other"),
        ({"decode": 2}, "need each other"),
        ({"prefill": 3, "decode": 2}, "must be a multiple"),
        ({"prefill": 1, "decode": 1, "replicas": 2}, "leave out replicas"),
        ({"prefill": 1, "decode": 1, "kv_transfer": "fax"}, "kv_transfer"),
    ],
)
def test_sides_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScaleSettings(**settings)


def test_pools_of_all_processes_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from milestones.serving.sides.engine import open_runner

    config, loaded = replace(CONFIG, num_pages=None, max_model_len=64), shared_model(CONFIG.model)
    sizes = []
    for num_prefill in (1, 3):
        monkeypatch.setattr(load("disaggregated", "kv_pool"), "available_memory", lambda: 400_000)
        runner = open_runner(loaded.model, config, num_prefill)
        sizes.append(runner.kv_pool.num_pages)
        runner.close()
    assert sizes[1] == sizes[0] // 2


def test_hidden_seconds_are_those_beside_a_forward() -> None:
    from milestones.serving.sides.meter import overlap

    assert overlap((1.0, 3.0), [(0.0, 1.5), (2.0, 2.25), (2.75, 9.0)]) == pytest.approx(1.0)
    assert overlap((1.0, 3.0), []) == 0


def test_a_long_history_costs_a_new_span_nothing() -> None:
    """4,096 forwards are kept, and a send for each layer of each step looks at them."""
    from milestones.serving.sides.meter import overlap

    looked_at = [0]

    class History(list[tuple[float, float]]):
        def __reversed__(self) -> Iterator[Any]:
            for span in super().__reversed__():
                looked_at[0] += 1
                yield span

    forwards = History((float(number), number + 0.5) for number in range(4096))
    assert overlap((4094.25, 4095.25), forwards) == pytest.approx(0.5)
    assert looked_at[0] <= 4
