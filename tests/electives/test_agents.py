"""agents: what pauses is evicted last, and no hint changes an answer or keeps a request waiting."""

from __future__ import annotations

import random
from typing import Any

import pytest

from common import AgentHint
from common.tracing.forced_retractions import force_retractions
from milestones.chain import package
from milestones.lab.instruments.audit import assert_idle
from milestones.lab.instruments.streams import EarlyStream, LateStream
from tests.conftest import EngineFactory, ModuleOf, build_engine, schedules
from tests.helpers.fake_overlap import expected_output, hash_engine
from tests.helpers.oracle import drain, greedy
from tests.helpers.random_schedule import add_random, random_prompt, random_sizes, run_schedule
from tests.helpers.replaced import plant
from tests.helpers.serving import Serve, serve_fixture

__all__ = ["serve_fixture"]

pytestmark = [pytest.mark.since("agents"), pytest.mark.streams]

SCHEDULES = schedules(400)
STREAMS = (LateStream, EarlyStream)


class HandClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def cache_of(engine: Any) -> Any:
    return engine.core.scheduler.kv_cache.radix_cache


def talks_of(engine: Any) -> Any:
    return engine.core.scheduler.kv_cache.conversations


def agents_engine(module_of: ModuleOf, num_pages: int, **config: Any) -> tuple[Any, HandClock]:
    """Return an engine on hashes with pages of two tokens, and its clock."""
    engine = hash_engine(module_of("engine"), LateStream(), num_pages, page_size=2, **config)
    clock = HandClock()
    talks_of(engine).use_clock(clock)
    return engine, clock


def answer(
    engine: Any, prompt: list[int], hint: AgentHint | None = None, max_tokens: int = 2
) -> int:
    """Serve one request, and return how many tokens of its prompt were cached."""
    name = engine.add_request(prompt, greedy(max_tokens, ignore_eos=True), agent_hint=hint)
    output = drain(engine)[name][-1]
    assert output.outputs[0].token_ids == expected_output(prompt, max_tokens)
    return int(output.metrics.num_cached_tokens)


def check_pauses(engine: Any) -> None:
    """I3: the counted protections are those of the pauses, and each protected page is there."""
    cache = cache_of(engine)
    held = [pause.node for pause in cache.pauses.values() if pause.node is not None]
    assert cache.protections == {node: held.count(node) for node in held}, "I3: protections"
    assert set(held) <= {*cache.nodes()}, "I3: a protected node has left the tree"


def fuzz(module: Any, seed: int, forwards: type[LateStream], copies: type[LateStream]) -> Any:
    """Run one random schedule with conversations, most of them never released; audit each step."""
    chance = random.Random(seed)
    page_size, longest, num_pages = random_sizes(chance)
    engine = hash_engine(
        module, forwards(), num_pages,
        page_size=page_size, max_num_seqs=chance.randint(1, 6),
        max_num_batched_tokens=chance.choice([1, 2, 5, 16, 64]),
        schedule_policy=chance.choice(["fcfs", "fcfs", "lpm"]),
    )  # fmt: skip
    engine.core.runner.copy_stream = copies()
    clock = HandClock()
    talks_of(engine).use_clock(clock)
    cache_of(engine).resize_host(chance.choice([0, 2, num_pages // 2, 2 * num_pages]))
    force_retractions(engine.core.scheduler, chance.choice([None, None, 2, 7]))
    said: dict[str, list[int]] = {}  # by conversation: its last prompt

    def add() -> tuple[str, list[int]]:
        name = f"talk {chance.randrange(4)}"
        more = random_prompt(chance, longest)
        goes_on = name in said and chance.random() < 0.7
        prompt = (said[name] + more)[:longest] if goes_on else more
        said[name] = prompt
        hint = AgentHint(
            name,
            expected_pause=chance.choice([None, 0.0, 1.0, 3600.0]),
            ttl=chance.choice([None, None, 0.0, 2.0, 86_400.0]),
            release=chance.random() < 0.1,
        )
        hints: dict[str, Any] = {"agent_hint": hint} if chance.random() < 0.8 else {}
        return add_random(engine, chance, prompt, **hints)

    def check_and_reset() -> None:
        clock.time += chance.choice([0.0, 0.1, 5.0])
        check_pauses(engine)
        if chance.random() < 0.01:
            engine.reset_prefix_cache()

    run_schedule(engine, chance, add, chance.randint(6, 16), before_step=check_and_reset)
    check_pauses(engine)
    return engine


@pytest.mark.parametrize("copies", STREAMS)
@pytest.mark.parametrize("forwards", STREAMS)
def test_random_schedules_with_conversations(
    module_of: ModuleOf, forwards: type[LateStream], copies: type[LateStream]
) -> None:
    """Schedules are exact to the token, and all end, whatever the hints promise (I2, I3, I5)."""
    module = module_of("engine")
    first = SCHEDULES // 4 * (2 * STREAMS.index(forwards) + STREAMS.index(copies))
    engines = [fuzz(module, first + i, forwards, copies) for i in range(SCHEDULES // 4)]
    assert sum(cache_of(e).num_demoted for e in engines) > len(engines) // 3
    assert sum(cache_of(e).num_loaded for e in engines) > len(engines) // 8
    assert sum(talks_of(e).everyone.count for e in engines) > len(engines) // 2


def pinned(_: Any, self: Any) -> int:
    """The mistake: protected pages are not counted as pages that can be evicted."""
    pages = {page for p in self.radix_cache.pauses.values() if p.node
             for page in p.node.prefix_pages()}  # fmt: skip
    free = len(self.allocator.free_pages) + self.radix_cache.evictable_size
    return int(free - len(pages))


def forgotten_protection(_: Any, self: Any, pause: Any) -> Any:
    node, pause.node = pause.node, None
    return node


def lost_on_demotion(original: Any, self: Any, session_id: str, node: Any, *times: Any) -> None:
    original(self, session_id, node, *times)
    self.protections[node] += 1


@pytest.mark.parametrize(
    ("target", "mistake"),
    [
        ("hi_radix_cache.HiRadixCache._unprotect", forgotten_protection),
        ("hi_radix_cache.HiRadixCache.protect", lost_on_demotion),
    ],
)
def test_planted_mistakes_are_caught(
    module_of: ModuleOf, milestone: str, monkeypatch: pytest.MonkeyPatch, target: str, mistake: Any
) -> None:
    plant(monkeypatch, f"{package(milestone)}.{target}", mistake)
    with pytest.raises((AssertionError, ValueError, IndexError, RuntimeError)):
        for seed in range(100):
            fuzz(module_of("engine"), seed, LateStream, LateStream)


def test_a_hint_that_is_never_released_starves_others_if_it_pins(
    module_of: ModuleOf, milestone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Break it of the page: with a hard pin, a request waits as long as the hint lasts (I5)."""

    def serve(num_steps: int) -> bool:
        engine, _clock = agents_engine(module_of, num_pages=12, max_num_seqs=2)
        for token in (1, 2):
            answer(engine, [token] * 9, AgentHint(f"talk {token}", ttl=86_400.0))
        small = engine.add_request([3] * 4, greedy(30, ignore_eos=True))
        engine.step()
        large = engine.add_request([4] * 9, greedy(2, ignore_eos=True))
        done = {small: False, large: False}
        for _ in range(num_steps):
            for output in engine.step():
                done[output.request_id] |= output.finished
        return all(done.values())

    assert serve(60)
    target = f"{package(milestone)}.kv_cache.KVCacheManager.num_free_pages"
    plant(monkeypatch, target, pinned)
    with pytest.raises(AssertionError):  # the pool has pages, and no request may have them
        assert serve(60)


def test_a_paused_conversation_outlives_newer_requests(module_of: ModuleOf) -> None:
    engine, _clock = agents_engine(module_of, num_pages=12)
    cache_of(engine).resize_host(0)
    answer(engine, [1] * 9, AgentHint("talk", expected_pause=1.0))
    for token in (2, 3, 4, 5):
        answer(engine, [token] * 9)
    assert answer(engine, [1] * 12, AgentHint("talk")) == 8
    check_pauses(engine)


def test_without_a_hint_the_oldest_goes_first(module_of: ModuleOf) -> None:
    engine, _clock = agents_engine(module_of, num_pages=12)
    cache_of(engine).resize_host(0)
    for token in (1, 2, 3, 4, 5):
        answer(engine, [token] * 9)
    assert answer(engine, [1] * 12) == 0


def test_protection_ends_with_its_time(module_of: ModuleOf) -> None:
    engine, clock = agents_engine(module_of, num_pages=12)
    cache_of(engine).resize_host(0)
    answer(engine, [1] * 9, AgentHint("talk", ttl=10.0))
    clock.time = 11.0
    for token in (2, 3, 4, 5):
        answer(engine, [token] * 9)
    assert answer(engine, [1] * 12) == 0
    assert cache_of(engine).pauses == {}


def test_a_replaced_state_loses_its_protection(module_of: ModuleOf) -> None:
    """The history was rewritten: the branch that no call will use goes before older requests."""
    engine, _clock = agents_engine(module_of, num_pages=24)
    cache_of(engine).resize_host(0)
    answer(engine, [1] * 4 + [2] * 9, AgentHint("talk", expected_pause=1.0))
    answer(engine, [9] * 9)
    answer(engine, [1] * 4 + [3] * 9, AgentHint("talk", expected_pause=1.0))
    cache = cache_of(engine)
    assert len(cache.pauses) == len(cache.protections) == 1
    answer(engine, [5] * 21)
    found = [cache.find(tokens).num_pages for tokens in ([1] * 4 + [2] * 8, [9] * 8)]
    assert found[0] < 6 and found[1] == 4, "the old branch goes, and the older request does not"
    assert cache.find([1] * 4 + [3] * 8).num_pages == 6


def test_an_ended_conversation_goes_first_and_is_not_copied(module_of: ModuleOf) -> None:
    engine, _clock = agents_engine(module_of, num_pages=16)
    answer(engine, [9] * 9)
    answer(engine, [1] * 9, AgentHint("talk"))
    answer(engine, [1] * 13, AgentHint("talk", release=True))
    cache = cache_of(engine)
    assert cache.pauses == {} and "talk" not in talks_of(engine).known
    answer(engine, [2] * 13)
    assert cache.num_written == 0 and cache.find([9] * 8).num_pages == 4
    assert cache.find([1] * 12).num_pages < 6


def test_a_demoted_conversation_keeps_its_copies(module_of: ModuleOf) -> None:
    """The host is full of copies that others may need. Those of the conversation stay."""
    engine, _clock = agents_engine(module_of, num_pages=12)
    cache_of(engine).resize_host(8)
    answer(engine, [1] * 9, AgentHint("talk", expected_pause=50.0))
    for token in (2, 3, 4, 5, 6, 7, 8):
        answer(engine, [token] * 21)
    assert cache_of(engine).num_demoted == 1
    assert answer(engine, [1] * 12, AgentHint("talk")) == 8
    assert cache_of(engine).num_loaded == 4


def test_an_aborted_call_protects_nothing(module_of: ModuleOf) -> None:
    engine, _clock = agents_engine(module_of, num_pages=12)
    name = engine.add_request([1] * 9, greedy(20, ignore_eos=True), agent_hint=AgentHint("talk"))
    for _ in range(3):
        engine.step()
    engine.abort_request(name)
    drain(engine)
    assert cache_of(engine).pauses == {}
    assert_idle(engine)


def test_a_call_that_is_aborted_while_it_waits_does_not_protect_for_ever(
    module_of: ModuleOf,
) -> None:
    engine, clock = agents_engine(module_of, num_pages=24, max_num_seqs=1)
    answer(engine, [1] * 9, AgentHint("talk", expected_pause=1.0))
    engine.add_request([2] * 9, greedy(20, ignore_eos=True))
    engine.step()
    waiting = engine.add_request([1] * 12, greedy(2), agent_hint=AgentHint("talk"))
    engine.abort_request(waiting)
    drain(engine)
    clock.time = 100.0
    answer(engine, [5] * 40)
    assert cache_of(engine).pauses == {}


def test_conversations_that_never_end_are_forgotten(
    module_of: ModuleOf, code_of: ModuleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3: a client may use a new id for each call, and release none of them."""
    monkeypatch.setattr(code_of("conversations"), "MOST_CONVERSATIONS", 5)
    engine, clock = agents_engine(module_of, num_pages=24)
    for number in range(12):
        answer(engine, [number + 1] * 9, AgentHint(f"talk {number}", expected_pause=1.0))
        clock.time += 10.0
    assert len(talks_of(engine).known) == 5
    assert len(cache_of(engine).pauses) <= 5


def test_a_short_prompt_protects_nothing(module_of: ModuleOf) -> None:
    """It has no whole page: the root of the tree must not count as a prefix."""
    engine, _clock = agents_engine(module_of, num_pages=8)
    answer(engine, [1], AgentHint("talk"), max_tokens=1)
    assert cache_of(engine).pauses == {}
    for token in (2, 3, 4):
        answer(engine, [token] * 9)


def test_the_next_call_ends_the_pause_that_is_learned(module_of: ModuleOf) -> None:
    engine, clock = agents_engine(module_of, num_pages=24)
    clock.time = 5.0
    answer(engine, [1] * 5, AgentHint("talk"))
    clock.time = 9.0
    answer(engine, [1] * 7, AgentHint("talk"))
    talk = talks_of(engine).known["talk"]
    assert talk.estimate.count == talks_of(engine).everyone.count == 1
    assert cache_of(engine).pauses["talk"].returns_at == pytest.approx(9.0 + 4.0**0.75)


def test_hints_change_no_answer_of_a_real_model(make_engine: EngineFactory) -> None:
    """I1: the tokens are those of m5, also where pages came back from the host."""
    engine: Any = make_engine(page_size=4, num_pages=20, max_num_seqs=2)
    engine.core.costs.page_seconds = 0.0
    prompts = [[i, *range(5, 38)] for i in (1, 2, 3, 4)]
    params = greedy(5, ignore_eos=True)
    with build_engine("m5_overlap", page_size=4) as m5:
        expected = m5.generate(prompts, params, progress=False)
    for _ in range(2):
        for i, prompt in enumerate(prompts):
            hint = AgentHint(f"talk {i}", expected_pause=float(i))
            name = engine.add_request(prompt, params, agent_hint=hint)
            assert drain(engine)[name][-1].outputs == expected[i].outputs
    assert cache_of(engine).num_loaded > 0 and cache_of(engine).num_demoted > 0


@pytest.mark.parametrize("hint", [{"session_id": "a"}, "a", 5, True])
def test_what_is_no_hint_is_refused(make_engine: EngineFactory, hint: Any) -> None:
    engine: Any = make_engine()
    with pytest.raises(ValueError, match="agent_hint must be"):
        engine.add_request([1, 2], greedy(2), agent_hint=hint)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"session_id": ""}, "session_id"),
        ({"session_id": "x" * 257}, "session_id"),
        ({"session_id": 5}, "session_id"),
        ({"session_id": "a", "expected_pause": -1.0}, "expected_pause"),
        ({"session_id": "a", "expected_pause": float("nan")}, "expected_pause"),
        ({"session_id": "a", "ttl": 1e9}, "ttl"),
        ({"session_id": "a", "release": 1}, "release"),
    ],
)
@pytest.mark.one_mode
def test_a_bad_hint_is_refused(milestone: str, fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        AgentHint(**fields)


@pytest.mark.parametrize("max_tokens", [2, 3, 4])
def test_the_last_of_several_children_does_not_release_the_prefix(
    module_of: ModuleOf, max_tokens: int
) -> None:
    """Equal outputs end at one node: its old protection ends while it is locked."""
    engine, _ = agents_engine(module_of, 14)
    cache_of(engine).resize_host(10)
    hint = AgentHint("talk", expected_pause=50.0)
    params = greedy(max_tokens, n=2, ignore_eos=True)
    engine.add_request([1] * 9, params, agent_hint=hint)
    drain(engine)
    for token in range(2, 9):
        answer(engine, [token] * 21)
    assert cache_of(engine).num_demoted == 1, "nothing was demoted: this test proves nothing"
    assert answer(engine, [1] * 12, AgentHint("talk")) == 8, "the host has its copies"


def test_what_is_remembered_of_conversations_is_bounded(
    module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many that pause for a day, one that is released again and again, and one that goes on."""
    module, most = module_of("conversations"), 8
    monkeypatch.setattr(module, "MOST_CONVERSATIONS", most)
    small = module_of("hi_radix_cache").SMALL_HEAP
    engine, _ = agents_engine(module_of, 60)
    cache = cache_of(engine)
    for number in range(40):
        answer(engine, [number + 3] * 5, AgentHint(f"{number}", ttl=86400.0))
        assert len(cache.pauses) <= most
        check_pauses(engine)
    for _ in range(2 * small):
        answer(engine, [1] * 9, AgentHint("same", release=True))
        answer(engine, [2] * 9, AgentHint("again", ttl=86400.0))
    assert len(cache._heap) <= small + 2 * sum(1 for _ in cache.nodes())
    assert len(cache.ends) <= small + 3 * most
    engine.check_invariants()


def test_a_last_call_that_is_aborted_in_the_queue_is_the_last(module_of: ModuleOf) -> None:
    """Its conversation is dead, so the pages of one that returns are evicted after its own."""
    engine, clock = agents_engine(module_of, 13, max_num_seqs=1)
    for name, token, pause in (("A", 1, 3600.0), ("B", 2, 5.0)):
        answer(engine, [token] * 9, AgentHint(name, expected_pause=pause, ttl=86400.0))
    engine.add_request([9] * 3, greedy(6, ignore_eos=True))
    engine.step()
    last = engine.add_request([1] * 12, greedy(2), agent_hint=AgentHint("A", release=True))
    engine.abort_request(last)
    drain(engine)
    clock.time = 1.0
    answer(engine, [7] * 17)
    cache = cache_of(engine)
    assert cache.find([2] * 8).num_pages == 4 and cache.find([1] * 8).num_pages < 4
    assert "A" not in cache.pauses and "A" not in talks_of(engine).known


def test_children_share_the_hint_of_their_parent(module_of: ModuleOf) -> None:
    engine, _clock = agents_engine(module_of, num_pages=24)
    params = greedy(2, n=2, ignore_eos=True)
    engine.add_request([1] * 9, params, agent_hint=AgentHint("talk"))
    drain(engine)
    assert len(cache_of(engine).pauses) == len(cache_of(engine).protections) == 1


@pytest.mark.extra("serve")
@pytest.mark.one_mode
def test_the_server_passes_hints_on(serve: Serve, milestone: str) -> None:
    engine: Any = build_engine(milestone)
    running = serve(engine)
    hint = {
        "session_id": "worker-7",
        "expected_pause": 2.5,
        "cache_control": {"type": "ephemeral", "ttl": 300},
    }
    body = {"prompt": [1] * 40, "max_tokens": 2, "temperature": 0, "agent_hint": hint}
    plain = {name: value for name, value in body.items() if name != "agent_hint"}
    texts = [running.post("/v1/completions", b)[1]["choices"][0]["text"] for b in (body, plain)]
    assert texts[0] == texts[1] and list(cache_of(engine).pauses) == ["worker-7"]
    ended = {"session_id": "worker-7", "context_management": {"edits": [{"type": "evict"}]}}
    assert running.post("/v1/completions", {**body, "agent_hint": ended})[0] == 200
    assert cache_of(engine).pauses == {}


@pytest.mark.extra("serve")
@pytest.mark.one_mode
@pytest.mark.parametrize(
    "hint",
    [
        {}, {"session_id": ""}, {"session_id": "a", "ttl": 5}, {"session_id": "a", "more": 1},
        {"session_id": "a", "cache_control": {"type": "persistent"}},
        {"session_id": "a", "cache_control": 300},
        {"session_id": "a", "context_management": {"edits": [{"type": "prefetch"}]}},
        {"session_id": "a", "context_management": {}}, "a", [],
    ],
)  # fmt: skip
def test_a_bad_hint_in_a_body_is_refused(serve: Serve, milestone: str, hint: Any) -> None:
    running = serve(build_engine(milestone))
    body = {"prompt": [1, 2, 3], "max_tokens": 2, "agent_hint": hint}
    assert running.post("/v1/completions", body)[0] == 400
    assert running.post("/v1/completions", {**body, "agent_hint": None})[0] == 200


@pytest.mark.extra("serve")
@pytest.mark.one_mode
def test_a_server_without_hints_ignores_them(serve: Serve) -> None:
    running = serve(build_engine("m5_overlap"))
    body = {"prompt": [1, 2, 3], "max_tokens": 2, "agent_hint": {"session_id": "a"}}
    assert running.post("/v1/completions", body)[0] == 200
