"""The stream, static decode steps, and the engine that overlaps them.

Futures and double buffers are in `tests/exercises/test_m5_2.py` and `test_m5_4.py`.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common import EngineConfig, SamplingParams
from milestones.chain import package
from milestones.lab.instruments.audit import poison_of
from milestones.lab.instruments.streams import LateStream
from tests import conftest
from tests.conftest import ROOT, EngineFactory, ModuleOf, build_engine, shared_model
from tests.exercises.by_hand import scheduled, watch
from tests.helpers.oracle import assert_one_answer, completions, drain, greedy

pytestmark = [pytest.mark.since("m5_overlap"), pytest.mark.streams]

THREADS = Path("/proc/self/task")


@pytest.fixture
def stream(module_of: ModuleOf) -> Iterator[Any]:
    opened = module_of("stream").ThreadStream()
    yield opened
    opened.close()


def test_work_runs_in_order_on_another_thread(stream: Any) -> None:
    seen: list[Any] = []
    gate = threading.Event()
    stream.launch(gate.wait)  # launching does not wait for it
    events = [stream.launch(lambda i=i: seen.append((i, threading.get_ident()))) for i in range(9)]
    assert seen == []
    gate.set()
    events[4].wait()
    assert [i for i, _ in seen][:5] == [0, 1, 2, 3, 4]
    stream.synchronize()
    assert [i for i, _ in seen] == list(range(9))
    assert {thread for _, thread in seen} != {threading.get_ident()}


def test_what_follows_a_failure_fails_unrun(stream: Any) -> None:
    seen: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    first, failed, after = (stream.launch(w) for w in (lambda: seen.append(1), fail, seen.clear))
    first.wait()
    for event in (failed, after):
        with pytest.raises(ZeroDivisionError):
            event.wait()
    assert seen == [1]
    stream.synchronize()  # the failure has been reported, so later work runs again
    stream.launch(lambda: seen.append(2)).wait()
    assert seen == [1, 2]


def test_a_thread_that_has_started_is_not_started_again(
    stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt may come after the thread has started and before `launch` knows of it."""
    start = stream.thread.start

    def interrupted() -> None:
        start()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stream.thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.launch(lambda: None)
    seen: list[int] = []
    stream.launch(lambda: seen.append(1)).wait()
    assert seen == [1]


def test_the_thread_ends_with_its_stream(module_of: ModuleOf) -> None:
    """A closed or dropped stream leaves no thread. A thread that waits holds no earlier work."""
    before = set(threading.enumerate())
    closed, dropped = (module_of("stream").ThreadStream() for _ in range(2))
    held: Any = type("Held", (), {})()
    for stream in (closed, dropped):
        stream.launch(lambda held=held: None).wait()
    alive = weakref.ref(held)
    del held
    assert len(set(threading.enumerate()) - before) == 2
    deadline = time.monotonic() + 10
    while alive() is not None and time.monotonic() < deadline:
        gc.collect()
    assert alive() is None, "I3: the thread holds work that is done"
    closed.close()
    closed.close()
    del dropped, stream
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        gc.collect()
    assert not set(threading.enumerate()) - before


def test_an_emulated_forward_takes_its_time(module_of: ModuleOf) -> None:
    stream = module_of("stream").ThreadStream(emulated_forward_ms=20)
    for _ in range(3):
        stream.launch(lambda: None)
    stream.synchronize()
    stream.close()
    assert len(stream.spans) == 3
    assert all(ended - began >= 0.02 for began, ended in stream.spans)
    assert all(
        a[1] <= b[0] for a, b in zip(list(stream.spans), list(stream.spans)[1:], strict=False)
    )


def test_a_gpu_is_not_emulated(module_of: ModuleOf) -> None:
    with pytest.raises(ValueError, match="emulated_forward_ms"):
        module_of("stream").open_stream(torch.device("cuda"), 10.0)


@pytest.mark.before("multi_step", "speculative", "disaggregated")
def test_a_step_returns_while_the_next_one_runs(
    make_engine: EngineFactory, module_of: ModuleOf
) -> None:
    """Each step waits once, for the step before. Requests known to end get no further step."""
    engine: Any = make_engine(num_pages=64, enable_overlap=True)
    stream = engine.core.runner.stream = LateStream()
    launches: list[Any] = []
    watch(engine.core.runner, "launch", lambda *arguments: launches.append(arguments))
    for i in range(3):
        engine.add_request([i, 1, 2], greedy(8, ignore_eos=True))
    for step in range(1, 8):
        assert len(engine.step()) == 3
        assert stream.num_waits == step, "the host must wait exactly once per step"
        assert len(launches) == step + 1 and len(engine.core.result_queue) == 1
    engine.step()
    assert len(launches) == 8 == engine.stats().num_steps, "a step was launched after a known end"
    assert engine.stats().padding_tokens == 0


def end_threads() -> None:
    """End the OpenMP threads of this thread, if torch has loaded GNU's OpenMP."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    for library in {line.split()[-1] for line in maps if "libgomp" in line}:
        ctypes.CDLL(library).omp_pause_resource_all(2)  # omp_pause_hard


@pytest.mark.skipif(not THREADS.exists(), reason="only Linux lists the threads of a process")
def test_planning_starts_no_threads(make_engine: EngineFactory) -> None:
    """Planning a step must not start OpenMP threads.

    Torch splits some operations for OpenMP, however small they are. On the host's thread they would
    start a pool of threads, which would share the cores with the forward.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine: Any = make_engine(num_pages=200, max_num_seqs=20, enable_overlap=True)
        runner, sizes, started = engine.core.runner, list[int](), list[int]()
        prepare = runner.inputs.prepare

        def counted(batch: Any, descriptor: Any) -> Any:
            runner.stream.synchronize()  # a forward that runs may start threads of its own
            threads = {path.name for path in THREADS.iterdir()}
            inputs = prepare(batch, descriptor)
            started.append(len({path.name for path in THREADS.iterdir()} - threads))
            sizes.append(len(batch.requests))
            return inputs

        runner.inputs.prepare = counted
        end_threads()  # of earlier tests
        for arrivals in (10, 6):
            for i in range(arrivals):
                engine.add_request([i] * 30, greedy(12, ignore_eos=True))
            for _ in range(5):
                engine.step()
        drain(engine)
    finally:
        torch.set_num_threads(before)
    assert 10 in sizes and 16 in sizes
    assert set(started) == {0}, f"planning a step started threads: {started}"


@pytest.mark.before("multi_step", "speculative")
def test_a_request_that_ends_unforeseen_leaves_one_step_later(make_engine: EngineFactory) -> None:
    """The request keeps its row and pages until the step that it is still in has written them."""
    engine: Any = make_engine(page_size=1, num_pages=64, enable_overlap=True)
    engine.core.runner.stream = LateStream()
    tokens = build_engine("m4_radix").generate([[5, 6]], greedy(9, ignore_eos=True))[0]
    stop = tokens.outputs[0].token_ids[3]
    length = tokens.outputs[0].token_ids.index(stop) + 1
    engine.add_request([5, 6], greedy(20, stop_token_ids=[stop], ignore_eos=True), "stops")
    engine.add_request([8, 9], greedy(20, ignore_eos=True), "goes on")
    outputs: dict[str, Any] = {}
    while not outputs.get("stops", False):
        outputs = {o.request_id: o.finished for o in engine.step()}
    assert [r.request_id for r in engine.core.scheduler.in_flight.finished] == ["stops"]
    held = engine.stats().kv_tokens_reserved
    finals = drain(engine)
    assert "stops" not in finals and engine.core.scheduler.in_flight.finished == []
    assert engine.stats().padding_tokens == 1, "exactly one token must be dropped"
    assert held >= 2 + length
    assert_one_answer("tiny-llama", finals["goes on"][-1], 20)


@pytest.mark.before("multi_step", "disaggregated")
def test_overlapping_changes_no_step(make_engine: EngineFactory) -> None:
    """If all ends are known in advance, the overlapped loop runs the same steps as the serial."""
    shapes = []
    for overlap in (False, True):
        engine: Any = make_engine(max_num_seqs=3, enable_overlap=overlap, seed=3)
        seen: list[Any] = []
        watch(engine.core.runner, "launch", lambda batch, _, to=seen: to.append(scheduled(batch)))
        for i in range(9):
            params = SamplingParams(max_tokens=1 + 3 * (i % 4), temperature=1, ignore_eos=True)
            engine.add_request([i + 1] * (1 + 5 * (i % 3)), params, f"{i}")
        shapes.append((seen, completions(engine)))
    assert shapes[0] == shapes[1]


@pytest.mark.before("multi_step")  # its plans end before memory is short
def test_it_waits_for_the_result_when_memory_is_short(make_engine: EngineFactory) -> None:
    """Retraction waits for the results: a request loses no memory while its step runs."""
    engine: Any = make_engine(page_size=1, num_pages=24, max_num_seqs=4)
    outputs = engine.generate([[1, 2], [3, 4], [5, 6]], greedy(16, ignore_eos=True))
    assert engine.stats().num_retractions > 0
    for output in outputs:
        assert_one_answer("tiny-llama", output, 16)


@pytest.mark.before("disaggregated")  # a step there is of two sides
def test_a_prefix_in_flight_is_waited_for(make_engine: EngineFactory) -> None:
    """Of requests with the same prefix, one computes it. The others join without a lost step."""
    counts = []
    for overlap in (False, True):
        engine = make_engine(page_size=4, max_num_seqs=8, enable_overlap=overlap)
        prompts = [[7] * 32 + [i, 3] for i in range(6)]
        engine.generate(prompts, greedy(6, ignore_eos=True))
        counts.append((engine.stats().num_steps, engine.stats().prefill_tokens))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("sizes", [[1, 2, 4, 8], [3], [8], []])
def test_padded_decodes_change_nothing(make_engine: EngineFactory, sizes: list[int]) -> None:
    """Batches shrink and grow in static tensors. A batch that fits no size runs without them."""
    engine: Any = make_engine(max_num_seqs=6)
    engine.core.runner.graphs.sizes = sizes
    prompts = [[i + 3] * (1 + 7 * i) for i in range(9)]
    params = [greedy(2 + (5 * i) % 11, ignore_eos=True) for i in range(9)]
    for output, one in zip(engine.generate(prompts, params), params, strict=True):
        assert_one_answer("tiny-llama", output, one.max_tokens)
    assert {descriptor.num_reqs for descriptor in engine.core.runner.graphs.steps} <= {*sizes}
    assert bool(engine.core.runner.graphs.steps) == bool(sizes)


def test_padding_writes_to_the_padding_page_only(make_engine: EngineFactory) -> None:
    engine: Any = make_engine(max_num_seqs=8, page_size=4, num_pages=40)
    engine.core.runner.graphs.sizes = [8]
    engine.add_request([1, 2, 3], greedy(12, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.core.runner.synchronize()
    held = {0, *engine.core.scheduler.kv_cache.table.rows[0]}
    untouched = [page for page in range(41) if page not in held]
    for memory in (*engine.core.runner.kv_pool.keys, *engine.core.runner.kv_pool.values):
        expected = torch.full_like(memory[:, untouched], poison_of(memory))
        assert torch.allclose(memory[:, untouched], expected, equal_nan=True)
    (step,) = engine.core.runner.graphs.steps.values()
    static = step.inputs
    assert static.metadata.slot_mapping.tolist()[1:] == [0] * 7
    assert static.metadata.page_table[1:].eq(0).all()
    assert static.metadata.page_table.shape == (8, -(-engine.config.max_model_len // 4))


def test_graph_sizes(module_of: ModuleOf) -> None:
    sizes = module_of("cuda_graph").graph_sizes
    assert [sizes(n) for n in (1, 3, 4, 5, 8, 20)] == [
        [1], [1, 2, 4], [1, 2, 4], [1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 4, 8, 16, 24],
    ]  # fmt: skip


def test_on_a_cpu_no_step_is_static(module_of: ModuleOf) -> None:
    """Nothing is copied into static buffers there, because no graph could replay the step."""
    config = EngineConfig(model="tiny-llama", device="cpu", max_num_seqs=5)
    engine = module_of("engine").LLMEngine(config, shared_model("tiny-llama"))
    engine.generate([[1, 2], [3]], greedy(4), progress=False)
    assert engine.core.runner.graphs.sizes == [] and not engine.core.runner.graphs.steps
    engine.close()


def test_the_suite_runs_on_the_stream_it_was_asked_for(make_engine: EngineFactory) -> None:
    engine: Any = make_engine()
    names = {"early": "EarlyStream", "late": "LateStream"}
    assert type(engine.core.runner.stream).__name__ == names.get(conftest.MODE, "ThreadStream")
    assert engine.config.enable_overlap == (conftest.MODE != "serial")


@pytest.mark.before("speculative", "disaggregated")
def test_leaving_with_a_step_in_flight(milestone: str) -> None:
    """The interpreter ends without an error, although the engine was not closed."""
    program = (
        "from common import EngineConfig, SamplingParams; import importlib;"
        f"engine = importlib.import_module('{package(milestone)}').LLMEngine("
        "EngineConfig(model='tiny-llama', device='cpu', emulated_forward_ms=50));"
        "engine.add_request([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True));"
        "engine.step(); assert engine.core.result_queue"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
