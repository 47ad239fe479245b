"""priority: preemption, the copies of pages on the host, and random schedules with both."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.guard import EngineDeadError
from common.tracing.forced_retractions import force_retractions
from milestones.chain import ROOT, course_place, load, package
from milestones.lab.instruments.audit import assert_idle, poison_free_pages
from milestones.lab.instruments.fake_cuda import FakeCuda
from milestones.lab.instruments.streams import EarlyStream, LateStream
from tests.conftest import EngineFactory, ModuleOf, build_engine, schedules
from tests.exercises.by_hand import make_request, scheduled, watch
from tests.helpers.fake_overlap import HashRunner, expected_output, hash_engine
from tests.helpers.oracle import assert_same_tokens, drain, greedy, reference
from tests.helpers.random_schedule import add_random, random_prompt, random_sizes, run_schedule
from tests.helpers.replaced import plant, put_on_gpu
from tests.helpers.serving import Serve, serve_fixture

__all__ = ["serve_fixture"]

pytestmark = [pytest.mark.since("priority"), pytest.mark.streams]

SCHEDULES = schedules(1000)
STREAMS = (LateStream, EarlyStream)


def cache_of(engine: Any) -> Any:
    return engine.core.scheduler.kv_cache.radix_cache


def check_copies(engine: Any) -> None:
    """I3: where a page is in the pool and on the host, both have the same keys and values."""
    cache, runner = cache_of(engine), engine.core.runner
    if cache.transfers or (runner.copied is not None and not runner.copied.is_done):
        return
    if runner.is_copying:  # a copy has failed: the next step fails, and then all pages are dropped
        return
    page_keys = load("priority", "hi_radix_cache").page_keys
    for node in cache.nodes():
        tokens = [token for part in node.path() for token in part.tokens]
        for key, page in zip(page_keys(tokens, cache.page_size), node.prefix_pages(), strict=True):
            if key in cache.copies:
                slots = range(page * cache.page_size, (page + 1) * cache.page_size)
                expected = [runner.memory[slot] for slot in slots]
                assert runner.host_pool.pages[cache.copies[key]] == expected, "I3: copies differ"


def fuzz(
    module: Any,
    seed: int,
    forwards: type[LateStream],
    copies: type[LateStream],
    runner_class: type[HashRunner] = HashRunner,
) -> Any:
    """Run one random schedule with priorities, on few pages of either pool; audit each step."""
    chance = random.Random(seed)
    page_size, longest, num_pages = random_sizes(chance)
    engine = hash_engine(
        module, forwards(), num_pages, runner_class,
        page_size=page_size, max_num_seqs=chance.randint(1, 6),
        max_num_batched_tokens=chance.choice([1, 2, 5, 16, 64]),
        schedule_policy=chance.choice(["fcfs", "fcfs", "lpm"]),
    )  # fmt: skip
    engine.core.runner.copy_stream = copies()
    cache_of(engine).resize_host(chance.choice([0, 2, num_pages // 2, 2 * num_pages, 200]))
    force_retractions(engine.core.scheduler, chance.choice([None, None, None, 2, 7]))

    def add() -> tuple[str, list[int]]:
        prompt = random_prompt(chance, longest)
        return add_random(engine, chance, prompt, priority=chance.choice([0, 0, 1, -3, 7]))

    def check_and_reset() -> None:
        check_copies(engine)
        if chance.random() < 0.01:
            engine.reset_prefix_cache()

    run_schedule(engine, chance, add, chance.randint(4, 14), before_step=check_and_reset)
    check_copies(engine)
    return engine


@pytest.mark.parametrize("copies", STREAMS)
@pytest.mark.parametrize("forwards", STREAMS)
def test_random_schedules_with_priorities(
    module_of: ModuleOf, forwards: type[LateStream], copies: type[LateStream]
) -> None:
    """Schedules are exact to the token, whenever forwards and copies run."""
    module = module_of("engine")
    first = SCHEDULES // 4 * (2 * STREAMS.index(forwards) + STREAMS.index(copies))
    engines = [fuzz(module, first + i, forwards, copies) for i in range(SCHEDULES // 4)]
    assert sum(e.core.scheduler.preemption.num_preemptions for e in engines) > len(engines) // 3
    assert sum(cache_of(e).num_written for e in engines) > 2 * len(engines)
    assert sum(cache_of(e).num_loaded for e in engines) > len(engines) // 3
    assert sum(e.stats().num_retractions for e in engines) > len(engines) // 3


def steps_do_not_wait(copy_pages: Any, self: Any, transfers: list[Any]) -> None:
    copy_pages(self, transfers)
    self.copied = None


def loads_do_not_wait(copy_pages: Any, self: Any, transfers: list[Any]) -> None:
    self.computed = None
    copy_pages(self, transfers)


def sources_stay(_: Any, self: Any, token_ids: list[int], start: int, most: int) -> Any:
    keys = load("priority", "hi_radix_cache").page_keys(token_ids, self.page_size)[start:][:most]
    found = next((i for i, key in enumerate(keys) if key not in self.copies), len(keys))
    return {key: self.copies[key] for key in keys[:found]}


def keys_of_single_pages(page_keys: Any, token_ids: list[int], page_size: int) -> list[bytes]:
    starts = range(0, len(token_ids) - page_size + 1, page_size)
    return [page_keys(token_ids[s : s + page_size], page_size)[0] for s in starts]


def in_flight_too(
    make_way: Any, self: Any, request: Any, running: Any, batch: Any, **_: Any
) -> Any:
    return make_way(self, request, running, batch, may_preempt=True)


COPY_PAGES, CACHE = "tests.helpers.fake_overlap.HashRunner.copy_pages", "hi_radix_cache"


@pytest.mark.parametrize(
    ("target", "mistake", "forwards", "copies"),
    [
        (COPY_PAGES, steps_do_not_wait, LateStream, LateStream),
        (COPY_PAGES, loads_do_not_wait, LateStream, EarlyStream),
        (f"{CACHE}.HiRadixCache.take_copies", sources_stay, LateStream, LateStream),
        (f"{CACHE}.page_keys", keys_of_single_pages, EarlyStream, EarlyStream),
        ("preemption.Preemption.make_way", in_flight_too, LateStream, LateStream),
    ],
)
def test_planted_mistakes_are_caught(
    module_of: ModuleOf,
    milestone: str,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    mistake: Any,
    forwards: type[LateStream],
    copies: type[LateStream],
) -> None:
    """The schedules can fail: they find each of these mistakes within 150."""
    plant(
        monkeypatch, target if target == COPY_PAGES else f"{package(milestone)}.{target}", mistake
    )
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError, RuntimeError)):
        for seed in range(150):
            fuzz(module_of("engine"), seed, forwards, copies)


def one_page_engine(module_of: ModuleOf, num_pages: int, **config: Any) -> Any:
    """Return an engine on hashes with pages of two tokens. Forwards and copies run late."""
    return hash_engine(module_of("engine"), LateStream(), num_pages, page_size=2, **config)


def answer(engine: Any, prompt: list[int], max_tokens: int = 2, **more: Any) -> Any:
    name = engine.add_request(prompt, greedy(max_tokens, ignore_eos=True), **more)
    output = drain(engine)[name][-1]
    assert output.outputs[0].token_ids == expected_output(prompt, max_tokens)
    return output


def test_a_prefix_that_left_the_pool_comes_back_from_the_host(module_of: ModuleOf) -> None:
    engine = one_page_engine(module_of, num_pages=12)
    prompts = [[i] * 17 for i in (1, 2, 3)]
    for prompt in prompts:
        assert answer(engine, prompt).metrics.num_cached_tokens == 0
    assert answer(engine, prompts[0]).metrics.num_cached_tokens == 16
    assert cache_of(engine).num_loaded > 0


def test_requests_with_copies_of_most_of_the_pool_all_finish(module_of: ModuleOf) -> None:
    """I5: each needs 40% of the pool for its copies. Pages are counted before they are taken."""
    engine = one_page_engine(module_of, num_pages=10, max_num_seqs=4)
    prompts = [[i] * 9 for i in (1, 2, 3, 4)]
    for prompt in prompts:
        answer(engine, prompt)
    names = [engine.add_request(p, greedy(6, ignore_eos=True)) for p in prompts]
    finals = drain(engine)
    for name, prompt in zip(names, prompts, strict=True):
        assert finals[name][-1].outputs[0].token_ids == expected_output(prompt, 6)
    assert_idle(engine)


@pytest.mark.parametrize("before", range(8))
def test_an_abort_gives_all_pages_back(module_of: ModuleOf, before: int) -> None:
    """I3: waiting, loading, preempted, or one step after a load."""
    engine = one_page_engine(module_of, num_pages=12, max_num_seqs=2)
    for token in (1, 2, 3):
        answer(engine, [token] * 17)
    names = [engine.add_request([t] * 17, greedy(9, ignore_eos=True), priority=5) for t in (1, 2)]
    for number in range(before):
        if number == 3:
            names.append(engine.add_request([4] * 9, greedy(9, ignore_eos=True), priority=0))
        engine.step()
    for name in names:
        assert engine.abort_request(name)
    drain(engine)
    assert_idle(engine)


def test_a_less_urgent_request_is_not_starved(module_of: ModuleOf) -> None:
    """I5: more urgent requests overtake it, but no more than the bound allows."""
    engine = one_page_engine(module_of, num_pages=20, max_num_seqs=1)
    bound = module_of("policy").MAX_OVERTAKING
    low = engine.add_request([1, 2, 3], greedy(4, ignore_eos=True), "low", priority=9)
    overtaken = 0
    while engine.output_processor.is_in_use(low):
        if len(engine.core.scheduler.waiting) < 2:
            engine.add_request([7, 7, 7], greedy(2, ignore_eos=True), priority=0)
            overtaken += 1
        engine.step()
        assert overtaken <= bound + 3, "I5: it waits for ever"
    assert overtaken > bound // 2, "the others came first as long as they could"
    drain(engine)


@pytest.mark.parametrize("priority", [None, "high", 1.5, True, 2**63])
def test_a_bad_priority_is_refused(make_engine: EngineFactory, priority: Any) -> None:
    engine: Any = make_engine()
    with pytest.raises(ValueError, match="priority must be"):
        engine.add_request([1, 2], greedy(2), priority=priority)
    assert not engine.has_unfinished_requests()


def test_children_have_the_priority_of_their_parent(make_engine: EngineFactory) -> None:
    engine: Any = make_engine()
    engine.add_request([1, 2], greedy(2, n=2), priority=-4)
    assert [request.priority for request in engine.core.scheduler.waiting] == [-4, -4]
    drain(engine)


def test_copies_have_the_bits_of_the_pages(make_engine: EngineFactory) -> None:
    """I1: tokens and log probabilities are those of m5 with all pages in its pool."""
    prompts = [[i, *range(5, 38)] for i in (1, 2, 3, 4)]
    params = greedy(5, ignore_eos=True, logprobs=3)
    engine: Any = make_engine(page_size=4, num_pages=20, max_num_seqs=1)
    engine.core.costs.page_seconds = 0.0
    with build_engine("m5_overlap", page_size=4, max_num_seqs=1) as m5:
        for _ in range(2):
            for prompt in prompts:
                (ours,) = engine.generate([prompt], params, progress=False)
                (theirs,) = m5.generate([prompt], params, progress=False)
                assert ours.outputs == theirs.outputs
                assert ours.metrics.num_cached_tokens == theirs.metrics.num_cached_tokens
    assert cache_of(engine).num_loaded >= 8
    engine.core.runner.copy_stream.synchronize()
    engine.core.runner.stream.synchronize()
    cache, pool = cache_of(engine), engine.core.runner.host_pool
    memories, num_compared = pool._memories(), 0
    for node in cache.nodes():
        tokens = [token for part in node.path() for token in part.tokens]
        keys = load("priority", "hi_radix_cache").page_keys(tokens, 4)
        for key, page in zip(keys, node.prefix_pages(), strict=True):
            if key in cache.copies:
                row = torch.cat([memory[:, page].flatten() for memory in memories])
                assert torch.equal(pool.pages[cache.copies[key]], row), "I3: the copy differs"
                num_compared += 1
    assert num_compared > 4


@pytest.mark.parametrize("free_pages", [0, 1, 5, 7.5, 31])
def test_the_host_pool_is_not_larger_than_the_free_memory(
    make_engine: EngineFactory, module_of: ModuleOf, free_pages: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Pinned memory takes up to twice as much: torch rounds its size up to a power of two."""
    engine: Any = make_engine(num_pages=20)
    page = engine.core.runner.host_pool.pages[0].nbytes
    free = int(free_pages * page)
    monkeypatch.setattr(module_of("host_pool"), "free_memory", lambda device: free)
    pages = module_of("host_pool").HostPool(engine.core.runner.kv_pool).pages
    assert pages.nbytes == 0 or 1 << (pages.nbytes - 1).bit_length() <= free
    assert len(pages) >= int(free_pages) // 2


def test_a_measured_copy_is_waited_for_on_the_gpu_of_the_model(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait for another GPU returns at once: then copies would seem to cost nothing."""
    engine: Any = make_engine()
    host_pool, waits = engine.core.runner.host_pool, list[Any]()
    second = torch.device("cuda", 1)
    host_pool.on_gpu, host_pool.copy = True, lambda *_: None
    host_pool.pool = SimpleNamespace(keys=[SimpleNamespace(device=second)])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.append(device))
    host_pool.measure()
    assert waits == [second, second]


@pytest.mark.parametrize("forwards", STREAMS)
def test_the_audit_fills_a_page_after_the_copies_that_read_it(
    make_engine: EngineFactory, module_of: ModuleOf, forwards: type[LateStream]
) -> None:
    """A page may be free again before its copy to the host has begun."""
    engine: Any = make_engine(page_size=4, num_pages=8)
    runner = engine.core.runner
    runner.stream.synchronize()
    runner.stream, runner.copy_stream = forwards(), LateStream()
    for memory in (*runner.kv_pool.keys, *runner.kv_pool.values):
        memory[:, 5] = 1.0
    runner.copy_pages([module_of("hi_radix_cache").Transfer(5, 0, to_host=True)])
    poison_free_pages(engine)
    runner.stream.synchronize()
    runner.copy_stream.synchronize()
    assert runner.host_pool.pages[0].eq(1.0).all()
    assert runner.kv_pool.keys[0][:, 5].isnan().all()


def test_on_a_gpu_streams_wait_for_events_and_the_host_does_not(
    make_engine: EngineFactory, module_of: ModuleOf
) -> None:
    device = FakeCuda()
    with device.installed():
        engine: Any = make_engine(page_size=4, num_pages=12, max_num_seqs=1, cuda_graph=False)
        engine.core.costs.observe = lambda *_: None  # the clock of the fake device stands still
        put_on_gpu(engine, module_of("stream"), "copy_stream")
        copies = engine.core.runner.copy_stream.stream
        copies.name = "copies"
        for token in (1, 2, 1):
            engine.generate([[token] * 33], greedy(1), progress=False)
    assert cache_of(engine).num_loaded > 0
    calls = device.names()
    load = calls.index("copies waits for event")
    assert calls[load - 1] == calls[load + 1] == "event copies", "within a copy"
    after = calls[load + 2 :]
    assert "side waits for event" in after[: after.index("synchronize event")], "before the step"
    assert "synchronize copies" not in calls and "synchronize device" not in calls


@pytest.mark.parametrize("is_cheap", [True, False])
def test_the_predicted_costs_decide(module_of: ModuleOf, is_cheap: bool) -> None:
    """Swap or recompute: a preempted request goes on with the same tokens in both ways."""
    engine = one_page_engine(module_of, num_pages=12, max_num_seqs=4)
    engine.core.costs.observe = lambda *_: None
    engine.core.costs.page_seconds, engine.core.costs.token_seconds = (
        (0.1 if is_cheap else 1.0),
        0.5,
    )
    low = engine.add_request([1] * 12, greedy(8, ignore_eos=True), priority=1)
    engine.step()
    urgent = engine.add_request([2] * 18, greedy(3, ignore_eos=True), priority=0)
    finals = drain(engine)
    assert engine.core.scheduler.preemption.num_preemptions == 1
    assert finals[low][-1].outputs[0].token_ids == expected_output([1] * 12, 8)
    assert finals[urgent][-1].outputs[0].token_ids == expected_output([2] * 18, 3)
    assert (cache_of(engine).num_loaded > 0) == is_cheap
    assert engine.stats().num_retractions == 0


class Refused(RuntimeError):
    pass


class EnqueuingStream(EarlyStream):
    """As on CUDA, the host runs the work, and a failure of it reaches the caller of `launch`."""

    def launch(self, work: Any, is_forward: bool = True) -> Any:
        event = super().launch(work, is_forward)
        self.failure = None
        if event.failure is not None:
            raise event.failure
        return event


@pytest.mark.parametrize("copies", [*STREAMS, EnqueuingStream])
@pytest.mark.parametrize("forwards", STREAMS)
def test_random_schedules_with_copies_that_fail(
    module_of: ModuleOf, forwards: type[LateStream], copies: type[LateStream]
) -> None:
    """Each fourth copy stops half-way. All requests have the right answers, as if none had."""
    module, failures = module_of("engine"), list[int]()

    class FailingRunner(HashRunner):
        def _copy(self, transfers: list[Any], computed: Any) -> None:
            chance = self.__dict__.setdefault("chance", random.Random(self.kv_pool.num_pages))
            if chance.random() < 0.25:
                failures.append(len(transfers))
                super()._copy(transfers[: len(transfers) // 2], computed)
                raise Refused("no memory for a copy")
            super()._copy(transfers, computed)

    engines = [fuzz(module, seed, forwards, copies, FailingRunner) for seed in range(90)]
    assert len(failures) > 20
    assert sum(cache_of(e).num_loaded for e in engines) > 20


@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_failed_copy_costs_time_and_no_request(
    make_engine: EngineFactory, module_of: ModuleOf, nth: int, on_cuda: bool
) -> None:
    """The engine goes on as if it had just been made: with nothing cached, and no copies."""
    prompts = {i: [i, *range(5, 38)] for i in (1, 2, 3)}
    expected = {i: reference("tiny-llama", tuple(prompts[i]), 2) for i in prompts}
    params = greedy(2, ignore_eos=True)
    with FakeCuda().installed() if on_cuda else nullcontext():
        engine: Any = make_engine(page_size=4, num_pages=20, max_num_seqs=1, cuda_graph=False)
        engine.core.costs.observe = lambda *_: None
        if on_cuda:
            put_on_gpu(engine, module_of("stream"), "copy_stream")
        copy, calls = engine.core.runner.host_pool.copy, iter(range(100))
        suspects: list[Any] = []
        watch(engine.search, "failed", suspects.extend)

        def failing(transfers: list[Any], before_loading: Any) -> None:
            copy(transfers, before_loading)
            if next(calls) == nth:
                raise Refused("the last transfer")

        engine.core.runner.host_pool.copy = failing
        for i in (1, 2, 3, 1, 2, 3, 1, 2, 3):
            [output] = engine.generate([prompts[i]], params, progress=False)[0].outputs
            assert (output.finish_reason, output.error) == ("length", None)
            assert_same_tokens(expected[i], output.token_ids)
        assert next(calls) > nth + 3, "pages are copied again"
        assert suspects == [], "no request is tried alone, because none is the cause"
        assert cache_of(engine).num_loaded > 0
        assert_idle(engine)
        engine.close()


def test_a_broken_invariant_of_a_copy_ends_the_engine(module_of: ModuleOf) -> None:
    engine = one_page_engine(module_of, num_pages=12)

    def broken(*_: Any) -> None:
        raise AssertionError("I3: here")

    engine.core.runner._copy = broken
    with pytest.raises(AssertionError, match="I3: here"):
        for token in (1, 2, 3):
            answer(engine, [token] * 17)
    with pytest.raises(EngineDeadError):
        engine.step()


def test_a_request_aborted_during_a_failed_load_leaves_no_page(module_of: ModuleOf) -> None:
    """Its pages were never written. In the tree, the next request would find them there."""
    engine = one_page_engine(module_of, num_pages=12)
    prompts = [[i] * 17 for i in (1, 2, 3)]
    for prompt in prompts:
        answer(engine, prompt)
    copy, loads = engine.core.runner._copy, list[int]()

    def failing(transfers: list[Any], computed: Any) -> None:
        if not all(transfer.to_host for transfer in transfers) and not loads:
            loads.append(len(transfers))
            raise Refused
        copy(transfers, computed)

    engine.core.runner._copy = failing
    engine.add_request(prompts[0], greedy(3, ignore_eos=True), "loads")
    engine.core.launch()
    engine.abort_request("loads")
    drain(engine)
    assert loads
    for number in range(30):
        answer(engine, prompts[number % 3])
    assert_idle(engine)


@pytest.mark.extra("serve")
def test_the_server_passes_the_priority_on(serve: Serve, milestone: str) -> None:
    running = serve()
    body = {"prompt": [1, 2, 3], "max_tokens": 2, "priority": -2}
    assert running.post("/v1/completions", body)[0] == 200
    status, answer, _ = running.post("/v1/completions", {**body, "priority": "high"})
    assert status == 400 and "priority" in answer["error"]["message"]


@pytest.mark.extra("serve")
def test_a_server_without_priorities_refuses_them(serve: Serve) -> None:
    running = serve(build_engine("m5_overlap"))
    body = {"prompt": [1, 2, 3], "max_tokens": 2}
    assert running.post("/v1/completions", {**body, "priority": 0})[0] == 200
    status, answer, _ = running.post("/v1/completions", {**body, "priority": 1})
    assert status == 400 and answer["error"]["param"] == "priority"


def test_urgent_requests_are_seen_behind_a_long_queue(module_of: ModuleOf) -> None:
    """The policy compares a window of the queue. The most urgent requests are in it."""
    engine = one_page_engine(module_of, num_pages=8)
    policy, scheduler = module_of("policy"), engine.core.scheduler
    for number in range(policy.WINDOW + 5):
        scheduler.add_request(make_request(f"r{number}", [1, 2]))
    urgent = make_request("urgent", [3, 4])
    urgent.priority = -1
    scheduler.add_request(urgent)
    assert scheduler.policy.order(scheduler.waiting)[0] is urgent


def picture(module_of: ModuleOf) -> list[str]:
    """Return the lines of the picture on the elective's page: a run with 12 pages of two tokens."""
    engine = one_page_engine(module_of, num_pages=12, max_num_seqs=4, enable_overlap=False)
    cells: dict[tuple[str, int], str] = {}
    rows = ("low", "urgent", "to host", "from host")
    prompts = {"low": [1] * 12, "urgent": [2] * 18}
    engine.add_request(prompts["low"], greedy(8, ignore_eos=True), "low", priority=1)
    counted, column = (0, 0), 0

    def note(batch: Any, _table: Any) -> None:
        for name, count in scheduled(batch):
            cells[name, column] = f"{count}"

    watch(engine.core.runner, "launch", note)
    while engine.has_unfinished_requests():
        column += 1
        if column == 3:
            engine.add_request(prompts["urgent"], greedy(3, ignore_eos=True), "urgent", priority=0)
        engine.step()
        counts = cache_of(engine).num_written, cache_of(engine).num_loaded
        for row, old, new in zip(rows[2:], counted, counts, strict=True):
            cells[row, column] = f"{new - old}" if new > old else ""
        counted = counts
    lines = ["step      " + "".join(f"{i:4}" for i in range(1, column + 1))]
    for row in rows:
        live = [i for name, i in cells if name == row] or [0]
        gaps = range(min(live), max(live)) if row in prompts else range(0)
        shown = [cells.get((row, i), "." if i in gaps else "") for i in range(1, column + 1)]
        lines.append(f"{row:10}" + "".join(f"{cell:>4}" for cell in shown).rstrip())
    return [line.rstrip() for line in lines]


def test_the_picture_of_the_page_is_that_of_a_run(module_of: ModuleOf) -> None:
    page = (ROOT / course_place("priority") / "README.md").read_text(encoding="utf-8")
    assert "\n".join(picture(module_of)) in page
