"""lora: random schedules with adapters on hashes, slots, the keys of the tree, and versions."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from common import LoRARequest
from common.tracing.forced_retractions import force_retractions
from milestones.chain import load
from milestones.lab.instruments.audit import assert_idle
from milestones.lab.instruments.streams import EarlyStream, LateStream
from tests.conftest import ModuleOf, schedules
from tests.helpers.fake_overlap import expected_output, hash_engine
from tests.helpers.oracle import drain, greedy
from tests.helpers.random_schedule import add_random, random_prompt, random_sizes, run_schedule
from tests.helpers.replaced import plant

pytestmark = [pytest.mark.since("lora"), pytest.mark.streams]

SCHEDULES = schedules(400)
STREAMS = (LateStream, EarlyStream)
PACKAGE = "milestones.electives.lora"


@pytest.fixture(autouse=True)
def adapters_without_files(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Adapters have no matrices here: hashes read the number of the load."""
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(load("lora", "adapters"), "read_adapter", lambda *_: {})


def wanted(name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, f"adapters/{name}")


def number_of(engine: Any, name: str | None) -> int | None:
    """Return the number of the load that a request with this adapter gets now."""
    return engine.adapters.adapters[name].number if name else None


def fuzz(
    module: Any,
    seed: int,
    stream: type[LateStream],
    counts: Counter[str],
    failure_rates: Sequence[float] = (0.0, 0.0, 0.1, 0.2),
) -> None:
    """Run one random schedule with adapters, loads, removals, aborts and failures."""
    chance = random.Random(seed)
    page_size, longest, num_pages = random_sizes(chance)
    engine = hash_engine(
        module, stream(), num_pages, page_size=page_size,
        max_num_seqs=chance.randint(1, 6), max_num_batched_tokens=chance.choice([1, 2, 5, 16, 64]),
        schedule_policy=chance.choice(["fcfs", "fcfs", "lpm", "random"]), seed=seed,
        max_loras=chance.choice([1, 1, 2, 3]), enable_overlap=chance.random() < 0.9,
    )  # fmt: skip
    rate = chance.choice(failure_rates)
    engine.core.runner.fails = lambda: chance.random() < rate
    force_retractions(engine.core.scheduler, chance.choice([None, None, None, 2, 7]))
    names = [None, *"ABCDE"[: chance.randint(1, 5)]]

    def add() -> tuple[str, list[int]]:
        adapter = chance.choice(names)

        def answer(tokens: list[int], most: int, stops: list[int], stop: str) -> list[int]:
            return expected_output(tokens, most, stops, stop, number_of(engine, adapter))

        prompt = random_prompt(chance, longest)
        return add_random(engine, chance, prompt, answer, lora_request=wanted(adapter))

    def load_and_remove() -> None:
        if chance.random() < 0.06 and (adapter := chance.choice(names)):
            engine.add_lora(wanted(adapter))
        if chance.random() < 0.03 and (adapter := chance.choice(names)):
            engine.remove_lora(adapter)

    count = chance.randint(4, 14)
    run_schedule(engine, chance, add, count, before_step=load_and_remove, may_fail=rate > 0)
    counts["loads"] += engine.core.scheduler.slots.num_loads
    counts["cached"] += engine.stats().cached_prompt_tokens
    counts["retractions"] += engine.stats().num_retractions
    counts["versions"] += engine.adapters.num_loads


@pytest.mark.parametrize("stream", STREAMS)
def test_random_schedules_with_adapters(module_of: ModuleOf, stream: type[LateStream]) -> None:
    """Schedules are exact to the token, whenever forwards run."""
    counts = Counter[str]()
    first = SCHEDULES // 2 * STREAMS.index(stream)
    for number in range(SCHEDULES // 2):
        fuzz(module_of("engine"), first + number, stream, counts)
    assert counts["loads"] > SCHEDULES and counts["versions"] > 1.25 * SCHEDULES, counts
    assert counts["cached"] > 1.25 * SCHEDULES and counts["retractions"] > SCHEDULES // 8, counts


def keys_without_adapters(_: Any, self: Any, request: Any, num_tokens: int) -> list[int]:
    return list(request.token_ids[:num_tokens])


def keys_by_name(_: Any, self: Any, request: Any, num_tokens: int) -> list[int]:
    keys = list(request.token_ids[:num_tokens])
    if keys and request.adapter is not None:
        keys[0] += ord(request.adapter.name) * 2**32
    return keys


def written_at_once(launch: Any, self: Any, batch: Any, table: Any) -> Any:
    self.adapters |= {load.slot: load.adapter.number for load in batch.loads}
    batch.loads = []
    return launch(self, batch, table)


def loads_are_not_undone(_: Any, self: Any, loads: Any) -> None:
    """Do nothing."""


def the_newest_leaves_its_slot(_: Any, self: Any) -> int:
    return int(self.free_slots.pop() if self.free_slots else self.resident.popitem()[1])


@pytest.mark.parametrize(
    ("target", "mistake"),
    [
        (f"{PACKAGE}.kv_cache.KVCacheManager.cache_key", keys_without_adapters),
        (f"{PACKAGE}.kv_cache.KVCacheManager.cache_key", keys_by_name),
        ("tests.helpers.fake_overlap.HashRunner.launch", written_at_once),
        (f"{PACKAGE}.adapter_slots.AdapterSlots.undo", loads_are_not_undone),
        (f"{PACKAGE}.adapter_slots.AdapterSlots.take_slot", the_newest_leaves_its_slot),
    ],
)
def test_planted_mistakes_are_caught(
    module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch, target: str, mistake: Any
) -> None:
    """The schedules can fail: they find each of these mistakes within 200."""
    plant(monkeypatch, target, mistake)
    with pytest.raises(AssertionError):
        for seed in range(200):
            fuzz(module_of("engine"), seed, LateStream, Counter())


def test_each_step_uses_the_slots_of_its_running_requests(
    module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without failures, the least recently used adapter is idle, as the answer of lora.1 says."""
    taken = Counter[str]()

    def observed(take_slot: Any, self: Any) -> int:
        if not self.free_slots:
            oldest = next(iter(self.resident))
            taken["in use" if oldest in self.in_use() else "idle"] += 1
        return int(take_slot(self))

    plant(monkeypatch, f"{PACKAGE}.adapter_slots.AdapterSlots.take_slot", observed)
    for seed in range(40):
        fuzz(module_of("engine"), seed, LateStream, Counter(), failure_rates=(0.0,))
    assert taken["idle"] > 20 and not taken["in use"], taken


def made(module_of: ModuleOf, **config: Any) -> Any:
    """Return an engine on hashes with pages of two tokens. Forwards run late."""
    return hash_engine(module_of("engine"), LateStream(), 60, page_size=2, **config)


def answer(engine: Any, prompt: list[int], adapter: str | None, max_tokens: int = 3) -> int:
    """Serve a request alone, check its tokens, and return how many of them were cached."""
    params = greedy(max_tokens, ignore_eos=True)
    name = engine.add_request(prompt, params, lora_request=wanted(adapter))
    expected = expected_output(prompt, max_tokens, number=number_of(engine, adapter))
    output = drain(engine)[name][-1]
    assert output.outputs[0].token_ids == expected
    return int(output.metrics.num_cached_tokens)


def test_each_version_of_an_adapter_has_prefixes_of_its_own(module_of: ModuleOf) -> None:
    """The same prompt is cold for the base, A, B, and A after a reload; then each finds its own."""
    engine, prompt = made(module_of), list(range(16))
    order = (None, "A", "B")
    assert [answer(engine, prompt, name) for name in order] == [0, 0, 0]
    assert [answer(engine, prompt, name) for name in order] == [14, 14, 14]
    engine.add_lora(wanted("A"))
    assert answer(engine, prompt, "A") == 0, "the same name and slot, with other matrices"
    assert answer(engine, prompt, "A") == 14
    engine.remove_lora("B")
    assert answer(engine, prompt, "B") == 0
    assert answer(engine, prompt, None) == 14


def test_a_request_without_a_slot_waits_and_the_base_needs_none(module_of: ModuleOf) -> None:
    """Two slots: A is between two chunks and B decodes. C waits; a base request passes it."""
    engine = made(module_of, max_loras=2, max_num_batched_tokens=8)
    params = greedy(20, ignore_eos=True)
    b = engine.add_request([5], params, "b", lora_request=wanted("B"))
    engine.step()
    a = engine.add_request(list(range(30)), params, "a", lora_request=wanted("A"))
    c = engine.add_request([7], params, "c", lora_request=wanted("C"))
    base = engine.add_request([8], params, "base")
    for _ in range(5):
        engine.step()
    assert {r.request_id for r in engine.core.scheduler.running} == {a, b, base}
    assert [r.request_id for r in engine.core.scheduler.waiting] == [c]
    engine.abort_request(a)
    engine.step()
    assert c in {r.request_id for r in engine.core.scheduler.running}, "the slot of A is free"
    drain(engine)
    assert_idle(engine)


def test_a_request_with_another_adapter_is_not_starved(module_of: ModuleOf) -> None:
    """I5: an endless stream on A overtakes C, but no more often than the bound allows."""
    engine = made(module_of, max_loras=1, max_num_seqs=4)
    bound, overtaken = module_of("policy").MAX_OVERTAKING, 0
    engine.add_request([1], greedy(9, ignore_eos=True), lora_request=wanted("A"))
    engine.step()
    c = engine.add_request([2], greedy(3, ignore_eos=True), "c", lora_request=wanted("C"))
    while engine.output_processor.is_in_use(c):
        if len(engine.core.scheduler.waiting) < 3:
            engine.add_request([7], greedy(5, ignore_eos=True), lora_request=wanted("A"))
            overtaken += 1
        engine.step()
        assert overtaken <= bound + 8, "I5: C waits for ever"
    assert overtaken >= bound // 2, "the others came first as long as they could"
    drain(engine)


def test_the_least_recently_used_adapter_leaves_its_slot(module_of: ModuleOf) -> None:
    engine = made(module_of, max_loras=2)
    for adapter in ("A", "B", "A", "C"):
        answer(engine, [3, 4], adapter)
    assert {adapter.name for adapter in engine.core.scheduler.slots.resident} == {"A", "C"}
    assert engine.core.scheduler.slots.num_loads == 3


@pytest.mark.parametrize("before", range(6))
def test_an_abort_lets_its_adapter_go(module_of: ModuleOf, before: int) -> None:
    """I3: waiting without a slot, between chunks, or in flight. No object holds the adapter."""
    engine = made(module_of, max_loras=1, max_num_batched_tokens=4)
    params = greedy(9, ignore_eos=True, n=2)
    for adapter in ("A", "B"):
        engine.add_request([7] * 9, params, adapter, lora_request=wanted(adapter))
    held = [weakref.ref(adapter) for adapter in engine.adapters.adapters.values()]
    assert Counter(r.adapter.name for r in engine.queued_requests()) == {"A": 2, "B": 2}
    for _ in range(before):
        engine.step()
    assert engine.remove_lora("A") and engine.remove_lora("B") and not engine.remove_lora("A")
    for name in ("A", "B"):
        engine.abort_request(name)
    drain(engine)
    assert_idle(engine)
    answer(engine, [1, 2], "C")
    gc.collect()
    assert not any(adapter() for adapter in held), "I3: an adapter without requests is held"


@pytest.mark.parametrize("end", ["length", "error"])
def test_a_request_that_ends_lets_its_adapter_go(module_of: ModuleOf, end: str) -> None:
    """I3: eight samples of one prompt, to their end, or until their forwards fail."""
    engine = made(module_of, max_loras=1, max_num_seqs=8)
    engine.add_request([7] * 9, greedy(5, ignore_eos=True, n=8), "a", lora_request=wanted("A"))
    held = weakref.ref(engine.adapters.adapters["A"])
    engine.step()
    assert engine.remove_lora("A")
    engine.core.runner.fails = lambda: end == "error"
    final = drain(engine)["a"][-1]
    assert {output.finish_reason for output in final.outputs} == {end}
    assert_idle(engine)
    del final
    engine.core.runner.fails = bool
    answer(engine, [1, 2], "B")  # takes the slot
    gc.collect()
    assert held() is None, "I3: an adapter without requests is held"


def test_a_live_request_keeps_its_version(module_of: ModuleOf) -> None:
    """The name is loaded again, and then removed, while requests wait and run."""
    engine, outputs = made(module_of, max_loras=1, max_num_seqs=1), {}
    for name in ("first", "second", "third"):
        if name != "first":
            engine.add_lora(wanted("A"))
        engine.add_request([4, 5], greedy(6, ignore_eos=True), name, lora_request=wanted("A"))
        outputs[name] = expected_output([4, 5], 6, number=engine.adapters.num_loads)
    engine.step()
    engine.remove_lora("A")
    for name, found in drain(engine).items():
        assert found[-1].outputs[0].token_ids == outputs[name]
    assert len({*map(tuple, outputs.values())}) == 3, "the versions have different answers"


def test_a_failed_forward_writes_its_adapters_again(module_of: ModuleOf) -> None:
    """A step that fails takes the step after it along, and with it the loads of that step."""
    engine = made(module_of, max_loras=2, max_num_seqs=4)
    engine.add_request([1, 2], greedy(8, ignore_eos=True), "a", lora_request=wanted("A"))
    engine.step()
    engine.add_request([3, 4], greedy(8, ignore_eos=True), "b", lora_request=wanted("B"))
    engine.core.runner.fails = lambda: True
    engine.step()
    engine.core.runner.fails = bool
    for name, found in drain(engine).items():
        prompt, number = ([1, 2], 1) if name == "a" else ([3, 4], 2)
        assert found[-1].outputs[0].token_ids == expected_output(prompt, 8, number=number)
    assert_idle(engine)


@pytest.mark.parametrize("wrong", ["A", 3, ("A", "adapters/A"), {"lora_name": "A"}])
def test_what_is_no_lora_request_is_refused(module_of: ModuleOf, wrong: Any) -> None:
    engine = made(module_of)
    with pytest.raises(ValueError, match="lora_request must be a LoRARequest"):
        engine.add_request([1], greedy(2), lora_request=wrong)
    assert not engine.has_unfinished_requests() and engine.list_loras() == []


def test_a_name_with_another_path_is_refused(module_of: ModuleOf) -> None:
    engine = made(module_of)
    engine.add_lora(wanted("A"))
    with pytest.raises(ValueError, match="loaded from adapters/A, not from elsewhere"):
        engine.add_request([1], greedy(2), lora_request=LoRARequest("A", "elsewhere"))
    assert not engine.has_unfinished_requests() and engine.list_loras() == ["A"]
