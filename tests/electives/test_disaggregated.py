"""disaggregated: both sides on hashes, their handshakes, and sides that die at any moment."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from common.tracing.forced_retractions import force_retractions
from milestones.chain import load
from milestones.lab.instruments.audit import assert_idle
from milestones.lab.instruments.streams import EarlyStream, LateStream
from tests.conftest import EngineFactory, ModuleOf, build_engine, schedules
from tests.exercises.by_hand import watch
from tests.helpers.fake_overlap import expected_output, hash_engine
from tests.helpers.oracle import drain, greedy
from tests.helpers.random_schedule import add_random, random_prompt, random_sizes, run_schedule
from tests.helpers.replaced import plant

pytestmark = [pytest.mark.since("disaggregated"), pytest.mark.streams]

SCHEDULES = schedules(600)
STREAMS = (LateStream, EarlyStream)
LEASE_SECONDS = load("disaggregated", "lease").LEASE_SECONDS
KILLS = 5


class HandClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


def check_sides(engine: Any) -> None:
    """I3: no page of either side is lost, and each lease is that of an attempt."""
    engine.check_invariants()
    prefill = engine.core.prefill
    ending = {end.attempt for end, _ in prefill.ending}
    assert {*prefill.leases.ends} <= {*prefill.scheduler.transfers} | ending, "I3: a lease is left"


def assert_both_idle(engine: Any) -> None:
    assert_idle(engine)
    prefill = engine.core.prefill
    stats = prefill.stats()
    assert not prefill.scheduler.transfers and not engine.core.scheduler.stand_ins, "I3"
    assert stats.kv_pages_free + stats.kv_pages_cached == stats.kv_pages_total, f"I3: {stats}"
    assert not prefill.transport.windows._open, "I3: pages may still be written"


def fuzz(
    module: Any, seed: int, stream: type[LateStream], before_step: Any = None, **more: Any
) -> Any:
    """Run one random schedule on few pages of both sides, with an audit of each step."""
    chance = random.Random(seed)
    page_size, longest, num_pages = random_sizes(chance)
    engine = hash_engine(
        module, stream(), num_pages,
        page_size=page_size, max_num_seqs=chance.randint(1, 6),
        max_num_batched_tokens=chance.choice([1, 2, 5, 16, 64]),
        enable_overlap=chance.random() < 0.9,
        schedule_policy=chance.choice(["fcfs", "fcfs", "lpm"]),
    )  # fmt: skip
    force_retractions(engine.core.scheduler, chance.choice([None, None, None, 2, 7]))
    chance_of_step = random.Random(-seed)

    def before() -> None:
        check_sides(engine)
        if chance.random() < 0.01:
            engine.reset_prefix_cache()
        if before_step is not None:
            before_step(engine, chance_of_step)

    def add() -> tuple[str, list[int]]:
        return add_random(engine, chance, random_prompt(chance, longest))

    run_schedule(engine, chance, add, chance.randint(4, 14), before_step=before, **more)
    later = engine.core.now() + 2 * LEASE_SECONDS
    engine.core.use_clock(lambda: later)  # what a dead side has left behind ends with its lease
    engine.step()
    assert_both_idle(engine)
    return engine


@pytest.mark.parametrize("stream", STREAMS)
def test_random_schedules_on_two_sides(module_of: ModuleOf, stream: type[LateStream]) -> None:
    """Schedules are exact to the token, whenever forwards and sends run. Each page goes once."""
    module, first = module_of("engine"), SCHEDULES * STREAMS.index(stream)
    engines = [fuzz(module, first + i, stream) for i in range(SCHEDULES)]
    assert sum(e.core.prefill.runner.num_pages_sent for e in engines) > 20 * len(engines)
    assert sum(e.stats().num_retractions for e in engines) > len(engines) // 3
    for engine in engines:
        writes = Counter((a, target) for a, _, target in engine.core.prefill.runner.writes)
        assert not writes or max(writes.values()) == 1, "a page was sent twice in one attempt"


def kill_at_random(engine: Any, chance: random.Random, clock: HandClock, kills: list[str]) -> None:
    """Let a side die, or let messages or a send be lost. The time goes on a little."""
    clock.time += chance.choice([0.0, 0.1, 1.0])
    if chance.random() < 0.1 and len(kills) < KILLS:
        kills.append(chance.choice(["prefill", "decode"]))
        getattr(load("disaggregated", "restart"), f"restart_{kills[-1]}")(engine.core)
        engine.audit()


def fuzz_with_kills(module: Any, seed: int, stream: type[LateStream]) -> list[str]:
    """Run one random schedule in which sides die. Return those that died."""
    kills, clock = list[str](), HandClock()

    def before_step(engine: Any, chance: random.Random) -> None:
        engine.core.use_clock(clock.now)
        kill_at_random(engine, chance, clock, kills)

    fuzz(module, seed, stream, before_step, may_fail=True)
    return kills


@pytest.mark.parametrize("stream", STREAMS)
def test_sides_die_at_any_moment(module_of: ModuleOf, stream: type[LateStream]) -> None:
    """No page is lost, each request ends once, and its tokens are those of one engine."""
    kills = list[str]()
    for seed in range(SCHEDULES // 5):
        kills += fuzz_with_kills(module_of("engine"), seed, stream)
    assert min(Counter(kills).values()) > 5 and len({*kills}) == 2


def two_sides(module_of: ModuleOf, num_pages: int = 40, **config: Any) -> tuple[Any, HandClock]:
    """Return an engine on hashes with pages of four tokens, and its clock."""
    config = {"page_size": 4, "max_num_batched_tokens": 8, **config}
    engine = hash_engine(module_of("engine"), LateStream(), num_pages, **config)
    clock = HandClock()
    engine.core.use_clock(clock.now)
    return engine, clock


def queue_of(engine: Any, name: str) -> str:
    """Return the queues of both sides that a request is in."""
    prefill, decode = engine.core.prefill.scheduler, engine.core.scheduler
    queues = {
        "prealloc": decode.prealloc_queue, "transfer": decode.transfer_queue,
        "arrived": decode.waiting_queue, "decode": decode.running,
        "bootstrap": prefill.bootstrap_queue, "waiting": prefill.waiting_queue,
        "prefill": prefill.running, "inflight": prefill.inflight_queue,
    }  # fmt: skip
    return " ".join(n for n, q in queues.items() if name in [r.request_id for r in q])


@pytest.mark.parametrize("before", range(16))
def test_an_abort_in_each_queue(module_of: ModuleOf, before: int) -> None:
    """I3: from the handshake to the last page, all comes back, and there is one final output."""
    engine, _ = two_sides(module_of, num_pages=24, max_num_seqs=3)
    names = [engine.add_request([i] * 22, greedy(12, ignore_eos=True)) for i in (1, 2, 3, 4)]
    for _ in range(before):
        engine.step()
    for name in names:
        engine.abort_request(name)
    finals = drain(engine)
    assert all(len([o for o in outputs if o.finished]) == 1 for outputs in finals.values())
    assert_both_idle(engine)
    for prompt in (1, 2):  # no unwritten page is in a tree
        (output,) = engine.generate([[prompt] * 22], greedy(4, ignore_eos=True), progress=False)
        assert output.outputs[0].token_ids == expected_output([prompt] * 22, 4)


def test_requests_are_seen_in_each_queue(module_of: ModuleOf) -> None:
    """The test above aborts requests in all of them."""
    engine, _ = two_sides(module_of, num_pages=24, max_num_seqs=3)
    for i in (1, 2, 3, 4):
        engine.add_request([i] * 22, greedy(12, ignore_eos=True), f"{i}")
    seen = set[str]()
    while engine.has_unfinished_requests():
        engine.step()
        for i in (1, 2, 3, 4):
            seen |= set(queue_of(engine, f"{i}").split())
    every = {"prealloc", "transfer", "arrived", "decode", "bootstrap", "waiting", "prefill"}
    assert seen >= every | {"inflight"}, every - seen


def test_another_layout_is_refused(module_of: ModuleOf) -> None:
    """I4: the client gets an error that names both layouts, and the next request is served."""
    engine, _ = two_sides(module_of)
    layout = engine.core.prefill.layout
    engine.core.prefill.layout = ("hash-model", 32, "auto", "auto")
    (output,) = engine.generate([[1, 2, 3]], greedy(4), progress=False)
    assert output.outputs[0].finish_reason == "error"
    assert "32" in output.outputs[0].error and "hash-model" in output.outputs[0].error
    assert_both_idle(engine)
    engine.core.prefill.layout = layout
    (output,) = engine.generate([[1, 2, 3]], greedy(4, ignore_eos=True), progress=False)
    assert output.outputs[0].token_ids == expected_output([1, 2, 3], 4)


def test_a_prefill_side_that_is_silent_is_declared_dead(module_of: ModuleOf) -> None:
    """I5: requests end with an error, after a bounded time and not before, and hold nothing."""
    engine, clock = two_sides(module_of)
    engine.core.run_prefill = engine.core.prefill.finish_sends = lambda: None
    engine.add_request([1] * 9, greedy(4), "A")
    ended_at = None
    for _ in range(100):
        for output in engine.step():
            ended_at = clock.time if output.finished else ended_at
        if ended_at is not None:
            break
        clock.time += 1.0
    attempts = module_of("receiver").MOST_ATTEMPTS
    assert ended_at is not None and LEASE_SECONDS < ended_at < (attempts + 1) * 1.5 * LEASE_SECONDS
    assert_idle(engine)


def test_a_busy_prefill_side_is_not_declared_dead(module_of: ModuleOf) -> None:
    """A request may wait in its queue for hours, as long as both sides answer."""
    engine, clock = two_sides(module_of, max_num_batched_tokens=1)
    for i in range(3):
        engine.add_request([i] * 30, greedy(2, ignore_eos=True), f"{i}")
    while engine.has_unfinished_requests():
        clock.time += 0.9 * LEASE_SECONDS
        for output in engine.step():
            assert output.outputs[0].finish_reason != "error", "I5"
    assert engine.core.receiver.numbers.__next__() == 4, "an attempt was stopped"


def test_a_computed_attempt_that_is_stopped_is_not_answered(module_of: ModuleOf) -> None:
    """I1: its lease expires before its last pages are sent, so they are not: it is tried again."""
    engine, clock = two_sides(module_of, num_pages=60, max_num_seqs=4)
    runner, waited = engine.core.runner, engine.core.wait
    runner.forget = lambda pages: None  # free pages keep what they had, as those of a real pool
    others = [[k] * 40 for k in (11, 12, 13, 14)]
    engine.generate(others, greedy(20, ignore_eos=True), progress=False)
    engine.reset_prefix_cache()
    slow = [False]

    def wait(*step: Any) -> Any:
        """Wait for a decode step that takes longer than a lease, once."""
        clock.time += LEASE_SECONDS + 1 if slow[0] else 0.1
        slow[0] = False
        return waited(*step)

    engine.core.wait = wait
    engine.add_request([9] * 6, greedy(60, ignore_eos=True), "busy")
    for _ in range(4):
        engine.step()
    engine.add_request([1, 2, 3, 4, 5, 6, 7], greedy(8, ignore_eos=True), "A")
    while not any(end.sampled is not None for end, _ in engine.core.prefill.ending):
        engine.step()
    slow[0] = True
    finals = {name: history[-1] for name, history in drain(engine).items()}
    answer = finals["A"].outputs[0].token_ids
    assert answer == expected_output([1, 2, 3, 4, 5, 6, 7], 8)
    assert engine.core.receiver.numbers.__next__() > 7, "no attempt was stopped: a vacuous test"
    assert_both_idle(engine)


def test_lost_attempts_are_tried_again_in_their_order(module_of: ModuleOf) -> None:
    engine, _ = two_sides(module_of, max_num_batched_tokens=4)
    for name in "ABC":
        engine.add_request([ord(name)] * 9, greedy(2, ignore_eos=True), name)
    while len(engine.core.scheduler.transfer_queue) < 3:
        engine.step()
    engine.core.receiver.lose_peer()
    assert [r.request_id for r in engine.core.scheduler.prealloc_queue] == ["A", "B", "C"]


def test_the_failure_of_the_last_request_leaves_nothing(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3: no step follows, so its attempt ends with it."""
    engine: Any = make_engine()

    def fails(*_: Any) -> None:
        raise RuntimeError("this forward fails")

    monkeypatch.setattr(engine.core.prefill.runner, "compute", fails)
    (output,) = engine.generate([[1, 2, 3]], greedy(4), progress=False)
    assert output.outputs[0].finish_reason == "error"
    assert_both_idle(engine)


def test_a_dead_decode_side_leaves_nothing_on_the_other(module_of: ModuleOf) -> None:
    """I3: its old attempts end with their leases, and not much later."""
    engine, clock = two_sides(module_of, max_num_batched_tokens=2)
    engine.add_request([1] * 30, greedy(3, ignore_eos=True))
    engine.step()
    load("disaggregated", "restart").restart_decode(engine.core)
    engine.audit()
    old = set(engine.core.prefill.scheduler.transfers)
    assert len(old) == 1
    last: Any = None
    while clock.time < 1.2 * LEASE_SECONDS:
        clock.time += 0.5
        last = next(iter(engine.step()), last)
    assert not old & set(engine.core.prefill.scheduler.transfers), "I3: kept without a lease"
    assert last.finished and last.outputs[0].token_ids == expected_output([1] * 30, 3)
    assert_both_idle(engine)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_link_that_fails_is_tried_again(module_of: ModuleOf, stream: type[LateStream]) -> None:
    """I1: pages that were lost are sent again, by new attempts."""
    engine = hash_engine(module_of("engine"), stream(), 40, page_size=4, max_num_batched_tokens=8)
    chance = random.Random(3)
    engine.core.prefill.runner.send_fails = lambda: chance.random() < 0.2
    prompts = [[i] * (5 + 7 * i) for i in range(5)]
    outputs = engine.generate(prompts, greedy(9, ignore_eos=True), progress=False)
    ended = [output.outputs[0] for output in outputs]
    assert sum(output.finish_reason == "length" for output in ended) >= 3
    for prompt, output in zip(prompts, ended, strict=True):
        assert output.token_ids == expected_output(prompt, len(output.token_ids))
    engine.core.prefill.runner.send_fails = bool
    engine.step()
    assert_both_idle(engine)


def test_messages_of_ended_attempts_change_nothing(module_of: ModuleOf) -> None:
    """They come late, twice, or for attempts that never were."""
    engine, _ = two_sides(module_of)
    transport, messages = engine.core.transport, module_of("transport")
    send, sent = transport.send, list[Any]()

    def twice(side: str, message: Any) -> None:
        for one in (message, message, *sent[-3:]):
            send(side, one) if side == "decode" else None
        if side == "prefill":
            send(side, message)
        elif isinstance(message, messages.End):
            sent.append(message)

    transport.send = twice
    for attempt in (99, 7):
        send("prefill", messages.Abort(attempt))
        send("prefill", messages.Pages(attempt, 0, [1]))
    prompts = [[i] * (5 + 7 * i) for i in range(5)]
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, greedy(6, ignore_eos=True), f"{i}")
    for _ in range(3):
        engine.step()
    engine.abort_request("2")
    finals = drain(engine)
    for i in (0, 1, 3, 4):
        assert finals[f"{i}"][-1].outputs[0].token_ids == expected_output(prompts[i], 6)
    assert_both_idle(engine)


def test_a_prefix_that_is_there_is_not_sent_again(module_of: ModuleOf) -> None:
    engine, _ = two_sides(module_of)
    prompt = list(range(21))
    for _ in range(2):
        (output,) = engine.generate([prompt], greedy(3, ignore_eos=True), progress=False)
        assert output.outputs[0].token_ids == expected_output(prompt, 3)
    assert engine.core.prefill.runner.num_pages_sent == 6 + 1
    assert output.metrics.num_cached_tokens == 20


def test_the_decode_side_computes_no_prompt(module_of: ModuleOf) -> None:
    """Also after retractions, each of its steps computes one token of each request."""
    engine, _ = two_sides(module_of, num_pages=12, max_num_seqs=4)
    batches = list[Any]()
    watch(engine.core.runner, "launch", lambda batch, _: batches.append(batch))
    prompts = [[i] * 9 for i in range(4)]
    outputs = engine.generate(prompts, greedy(20, ignore_eos=True), progress=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == expected_output(prompt, 20)
    assert engine.stats().num_retractions > 0 and all(batch.is_decode for batch in batches)


def test_pages_are_sent_while_the_next_layer_is_computed(make_engine: EngineFactory) -> None:
    """A layer goes as soon as it is stored. The bytes on both sides are the same."""
    engine: Any = make_engine(page_size=4, num_pages=20, max_num_batched_tokens=10)
    runner, order = engine.core.prefill.runner, list[str]()
    watch(runner, "send_layer", lambda layer: order.append(f"send {layer}"))
    layers = engine.loaded.model.model.layers
    hooks = [
        layer.register_forward_pre_hook(lambda *_, i=i: order.append(f"compute {i}"))
        for i, layer in enumerate(layers)
    ]
    prompt = list(range(5, 18))
    engine.generate([prompt], greedy(1), progress=False)
    for hook in hooks:
        hook.remove()
    first = [f"{what} {i}" for i in range(len(layers)) for what in ("compute", "send")]
    assert order[: len(first)] == first
    kv_caches = [side.scheduler.kv_cache for side in (engine.core.prefill, engine.core)]
    found = []
    for kv_cache, pool in zip(kv_caches, (runner.kv_pool, runner.target), strict=True):
        pages = kv_cache.radix_cache.match_prefix(prompt[:12]).prefix_pages()
        assert len(pages) == 3
        found.append([memory[:, pages] for memory in (*pool.keys, *pool.values)])
    for sent, arrived in zip(*found, strict=True):
        assert torch.equal(sent, arrived), "I1: a page has other bytes after its transfer"


def test_answers_have_the_bits_of_m5(make_engine: EngineFactory) -> None:
    """I1: tokens and log probabilities, in chunks and with cached prefixes."""
    prompts = [[*range(30), i] for i in range(4)] + [[7], [8] * 16]
    params = greedy(6, ignore_eos=True, logprobs=3)
    config: dict[str, Any] = {"page_size": 4, "num_pages": 64, "max_num_batched_tokens": 12}
    engine = make_engine(**config)
    with build_engine("m5_overlap", **config) as m5:
        for _ in range(2):
            for prompt in prompts:
                (ours,) = engine.generate([prompt], params, progress=False)
                (theirs,) = m5.generate([prompt], params, progress=False)
                assert ours.outputs == theirs.outputs
                assert ours.metrics.num_cached_tokens == theirs.metrics.num_cached_tokens


def no_stand_ins(drop: Any, self: Any, request: Any, attempt: int) -> None:
    drop(self, request, attempt)
    self.release(attempt)


def reuse_at_once(settle: Any, self: Any, result: Any) -> Any:
    sent = settle(self, result)
    self.copied = None
    return sent


def keep_the_number(bootstrap: Any, self: Any, request: Any) -> None:
    bootstrap(self, request)
    attempt = self.attempts[request]
    if attempt > 1:
        self.numbers = iter(range(1, 10**6))


@pytest.mark.parametrize(
    ("target", "mistake"),
    [
        ("milestones.electives.disaggregated.decode.DecodeScheduler.drop", no_stand_ins),
        pytest.param(
            "tests.helpers.fake_sides.HashPrefillRunner.settle",
            reuse_at_once,
            marks=pytest.mark.thorough("some hundred schedules until pages are retracted in time"),
        ),
        ("milestones.electives.disaggregated.receiver.Receiver._bootstrap", keep_the_number),
    ],
)
def test_planted_mistakes_are_caught(
    module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch, target: str, mistake: Any
) -> None:
    """The schedules can fail: they find each of these mistakes."""
    plant(monkeypatch, target, mistake)
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError, RuntimeError)):
        for seed in range(800):
            fuzz_with_kills(module_of("engine"), seed, LateStream)
            fuzz(module_of("engine"), seed, LateStream)
