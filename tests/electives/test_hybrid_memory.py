"""hybrid_memory: windows give pages back, and the tree finds what every group can resume from."""

from __future__ import annotations

import functools
import itertools
import random
import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common import EngineConfig, LoadedModel, UnsupportedModelError
from common.hf.support import LayerKV
from common.hf.tiny import byte_tokenizer
from common.tracing.forced_retractions import force_retractions
from milestones.chain import ROOT, course_place, load
from milestones.lab.instruments.streams import EarlyStream, LateStream
from tests.conftest import EngineFactory, ModuleOf, schedules
from tests.exercises.by_hand import make_request
from tests.helpers.fake_hybrid import Groups, expected_output, groups_of, hybrid_engine
from tests.helpers.fake_overlap import hash_engine
from tests.helpers.oracle import Reference, assert_same_tokens, drain, generate, greedy
from tests.helpers.random_schedule import (
    STEMS,
    add_random,
    random_prompt,
    random_sizes,
    run_schedule,
)
from tests.helpers.replaced import plant
from tests.helpers.sweep_models import PAGE, subject
from tests.helpers.tiny_configs import tiny_config

pytestmark = [pytest.mark.since("hybrid_memory"), pytest.mark.streams]

SCHEDULES = schedules(300)
STREAMS = (LateStream, EarlyStream)
PACKAGE = "milestones.electives.hybrid_memory"


def random_groups(chance: random.Random) -> Groups:
    windows = [chance.choice([1, 2, 3, 4, 5, 8, 9, 13]) for _ in range(chance.choice([1, 1, 2]))]
    has_full = chance.random() < 0.7
    if chance.random() < 0.5:  # states; with windows, or with full attention alone
        windows, count = windows[: chance.choice([0, 1])], chance.choice([0, 1, 2, 5, 20])
        return groups_of(*windows, has_full=has_full or not windows, num_snapshots=count)
    return groups_of(*windows, has_full=has_full)


def fuzz(module: Any, seed: int, stream: type[LateStream]) -> Any:
    """Run one random schedule with windows, on few pages; audit each step."""
    chance = random.Random(seed)
    groups = random_groups(chance)
    page_size, longest, blocks = random_sizes(chance, (1, 2, 3, 4, 7))
    engine = hybrid_engine(
        module, stream(), blocks * len(groups), groups, page_size=page_size,
        max_num_seqs=chance.randint(1, 6), enable_overlap=chance.random() < 0.9,
        max_num_batched_tokens=chance.choice([1, 2, 5, 16, 64]),
        schedule_policy=chance.choice(["fcfs", "fcfs", "lpm", "dfs-weight"]),
    )  # fmt: skip
    force_retractions(engine.core.scheduler, chance.choice([None, None, None, 2, 7]))
    if chance.random() < 0.25:
        distances = (chance.randint(5, 25) for _ in range(500))
        engine.core.runner.failing = {*itertools.accumulate(distances)}
        engine.core.runner.is_searching = lambda: engine.search.is_active

    def add() -> tuple[str, list[int]]:
        answer = functools.partial(expected_output, groups)
        return add_random(engine, chance, random_prompt(chance, longest), answer)

    def reset() -> None:
        if chance.random() < 0.01:
            engine.reset_prefix_cache()

    run_schedule(engine, chance, add, chance.randint(4, 14), before_step=reset)
    engine.reset_prefix_cache()
    assert engine.stats().kv_pages_free == engine.stats().kv_pages_total, "I3: a page is lost"
    return engine


@pytest.mark.parametrize("stream", STREAMS)
def test_random_schedules_with_windows(module_of: ModuleOf, stream: type[LateStream]) -> None:
    """Schedules with windows are exact to the token, whenever forwards run."""
    first = SCHEDULES // 2 * STREAMS.index(stream)
    engines = [fuzz(module_of("engine"), first + i, stream) for i in range(SCHEDULES // 2)]
    stats = [engine.stats() for engine in engines]
    assert sum(s.num_retractions for s in stats) > len(engines) // 2
    assert sum(s.cached_prompt_tokens for s in stats) > 6 * len(engines)


def one_too_short(first_block: Any, self: Any, num_tokens: int) -> int:
    return int(first_block(self, num_tokens + 1))


def for_the_last_query(allocate_slots: Any, self: Any, request: Any, num_tokens: int) -> None:
    """Give back what the last query of the coming chunk does not see."""
    allocate_slots(self, request, num_tokens)
    num_cached = self.last_nodes[request.row].num_prefix_pages
    self.table.slide(request.row, num_tokens - 1, num_cached)


def own_pages_stay(_: Any, self: Any, row: int, pages: list[int]) -> Any:
    return super(type(self), self).replace(row, pages)


def gaps_are_found(_: Any, self: Any, blocks: Any) -> int:
    return len(blocks)


@pytest.mark.parametrize(
    ("place", "mistake"),
    [
        ("kv_groups.WindowPages.first_block", one_too_short),
        ("hybrid_kv_cache.HybridKVCacheManager.allocate_slots", for_the_last_query),
        ("hybrid_kv_cache.HybridPageTable.replace", own_pages_stay),
        ("hybrid_radix_cache.HybridRadixCache.resumable", gaps_are_found),
    ],
)
def test_planted_mistakes_are_caught(
    module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch, place: str, mistake: Any
) -> None:
    """The schedules can fail: they find each of these mistakes within 40."""
    plant(monkeypatch, f"{PACKAGE}.{place}", mistake)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(40):
            fuzz(module_of("engine"), seed, STREAMS[seed % 2])


@pytest.mark.parametrize("seed", range(3))
def test_without_windows_it_is_m5(module_of: ModuleOf, seed: int) -> None:
    """The same requests have the same tokens, steps, hits and evictions as on m5."""
    chance = random.Random(seed)
    page_size, num_pages = chance.choice([1, 2, 4]), chance.choice([24, 40])
    engines = [
        hash_engine(
            load(name, "engine"), LateStream(), num_pages, page_size=page_size, max_num_seqs=3,
            max_num_batched_tokens=9, schedule_policy="lpm",
        )
        for name in ("m5_overlap", "hybrid_memory")
    ]  # fmt: skip
    for number in range(12):
        prompt = [*chance.choice(STEMS), *(chance.randrange(50) for _ in range(9))][:20]
        for engine in engines:
            engine.add_request(prompt, greedy(4, ignore_eos=True), f"r{number}")
        for _ in range(chance.randint(0, 3)):
            m5, ours = ([o.outputs for o in engine.step()] for engine in engines)
            assert m5 == ours
            assert engines[0].stats() == engines[1].stats()
    assert {name: out[-1].outputs for name, out in drain(engines[0]).items()} == {
        name: out[-1].outputs for name, out in drain(engines[1]).items()
    }
    assert engines[0].stats() == engines[1].stats()


# Windows of 8 in some layers or in all of them; soft caps of scores and logits; sinks.
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    },
    "gpt_oss": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 0},
    "cohere2": {},
}
PROMPTS = [[5 + 31 * i % 250 for i in range(n)] for n in (37, 1, 21, 37, 29)]
PROMPTS[2][:16] = PROMPTS[0][:16]  # a prefix of two pages is shared, and then a branch begins


def tiny(model_type: str) -> LoadedModel:
    """Return a random model with windows of 8 tokens. The weights never vary."""
    config = tiny_config(
        model_type, small_windows=True, sliding_window=8, attn_implementation="eager",
        **MODELS[model_type],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # a sink of zero would hide that it is forgotten
            parameter.data = torch.tensor([4.0, -4.0] * (len(parameter) // 2))
    return LoadedModel(f"tiny {model_type}", model, byte_tokenizer())


@functools.cache
def references(model_type: str) -> list[Reference]:
    """Return the results of Hugging Face's `generate`."""
    return [generate(tiny(model_type), tuple(prompt), 14) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("model_type", "budget"),
    [("mistral", 3), ("mistral", 64), *((model_type, 12) for model_type in MODELS)],
)
def test_the_answers_of_hugging_face(
    make_engine: EngineFactory, model_type: str, budget: int
) -> None:
    """I1: in chunks, with retractions, and with prefixes of the cache: all tokens are the same."""
    engine: Any = make_engine(
        tiny(model_type), max_model_len=64, page_size=4, num_pages=90, max_num_seqs=3,
        max_num_batched_tokens=budget,
    )  # fmt: skip
    force_retractions(engine.core.scheduler, 25)
    groups = engine.core.runner.kv_pool.groups
    assert [group.window for group in groups if group.window] == [8] * (len(groups) - 1)
    assert len(groups) == {"gemma3_text": 5}.get(model_type, 2)
    for _ in range(2):  # the second time, the prompts are cached
        outputs = engine.generate(PROMPTS, greedy(14), progress=False)
        for expected, output in zip(references(model_type), outputs, strict=True):
            assert_same_tokens(expected, output.outputs[0].token_ids)
    assert engine.stats().num_retractions > 0
    assert outputs[0].metrics.num_cached_tokens >= 16


def test_only_what_no_query_sees_is_masked(module_of: ModuleOf) -> None:
    """I1: with a window of 8, a huge key at i - 8 changes nothing, and one at i - 7 does."""
    attention, hybrid = (module_of(name) for name in ("attention", "hybrid_attention"))
    torch.manual_seed(0)
    keys, values = torch.randn(2, 7, 4, 8), torch.randn(2, 7, 4, 8)  # six pages of four tokens
    table = torch.tensor([[5, 2, 6, 1, 4, 3]], dtype=torch.int32)
    query = torch.randn(1, 4, 8)

    def outputs(last: int) -> list[torch.Tensor]:
        """Return the result for the query at position `last`, as a decode and as a chunk."""
        results = []
        for decodes in (1, 0):
            meta = attention.AttentionMetadata(
                torch.tensor([0]), torch.tensor([0, 1], dtype=torch.int32),
                torch.tensor([last + 1], dtype=torch.int32), table, 4, decodes, [1], [last + 1], 8,
            )  # fmt: skip
            compute = hybrid.paged_decode if decodes else hybrid.paged_prefill
            results.append(compute(query, keys, values, meta, 0.3))
        return results

    for last in (7, 8, 13, 20, 23):
        before = outputs(last)
        assert torch.allclose(before[0], before[1], atol=1e-6)
        for distance, changes in ((8, False), (7, True)):
            if distance <= last:
                page, slot = table[0, (last - distance) // 4], (last - distance) % 4
                kept = values[:, page, slot].clone()
                values[:, page, slot] = 1e6
                same = [torch.equal(a, b) for a, b in zip(before, outputs(last), strict=True)]
                assert same == [not changes] * 2, f"the query at {last}, {distance} positions back"
                values[:, page, slot] = kept


def test_soft_caps_and_sinks_by_hand(module_of: ModuleOf) -> None:
    """The cap comes after the scale and before the mask; a sink is one logit more, once."""
    attention: Any = module_of("hybrid_attention")
    torch.manual_seed(1)
    q, k, v = 50 * torch.randn(4, 3, 8), torch.randn(4, 5, 8), torch.randn(4, 5, 8)
    sinks = torch.tensor([4.0, -4.0, 4.0, -4.0])
    for window in (None, 2, 1):
        seen = torch.ones(3, 5).tril(2).bool()
        seen &= torch.ones(3, 5).triu(3 - (window or 9)).bool()
        scores = 5.0 * torch.tanh((q @ k.transpose(-1, -2)) * 0.3 / 5.0)
        scores = scores.masked_fill(~seen, -torch.inf)
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.exp()[:, None, None])
        found = attention.attend(q, k, v, window, 0.3, 5.0, sinks)
        assert torch.allclose(found, weights @ v, atol=1e-4)
        found = attention.attend(q, k, v, window, 0.3, 5.0, None)
        assert torch.allclose(found, scores.softmax(-1) @ v, atol=1e-4)


@pytest.mark.parametrize("length", [15, 16, 17, 33])
def test_pages_longer_than_the_window(module_of: ModuleOf, length: int) -> None:
    """I3: no leaf is left that no request can resume from, and all pages come back."""
    groups = groups_of(8)
    engine = hybrid_engine(module_of("engine"), LateStream(), 12, groups, page_size=16)
    for prompt in ([1] * length, [1] * length, [1] * length + [2] * 9, [1] * 16 + [3] * length):
        name = engine.add_request(prompt, greedy(3, ignore_eos=True))
        got = drain(engine)[name][-1].outputs[0].token_ids
        assert got == expected_output(groups, prompt, 3)
        engine.check_invariants()
        engine.core.scheduler.kv_cache.allocator.free(
            engine.core.scheduler.kv_cache.radix_cache.evict(1)
        )
        engine.check_invariants()
    engine.reset_prefix_cache()
    assert engine.stats().kv_pages_free == 12


def row_of(model: str, layers: list[LayerKV], num_tokens: int) -> list[str]:
    """Return the cells of a row of the page's table."""
    groups_module = load("hybrid_memory", "kv_groups")
    groups = groups_module.make_groups(layers, num_tokens * 2)
    allocator = groups_module.BlockAllocator(0, 16, groups)
    counts = (
        num_tokens // 16 * allocator.pages_per_block,
        allocator.most_pages(num_tokens, 512),
        allocator.most_pages(num_tokens, 1),
    )
    windows = [layer.window for layer in layers if layer.window]
    described = [f"{len(windows)} of {len(layers)}", windows[0], num_tokens, *counts]
    return [model, *map(str, described)]


def test_the_table_of_the_page() -> None:
    def layers(count: int, every: int | None, window: int) -> list[LayerKV]:
        """One layer in this many has full attention."""
        full = [every is not None and number % every == every - 1 for number in range(count)]
        return [LayerKV(1, 8, 8, None if is_full else window) for is_full in full]

    models = {
        "Gemma 3 27B": layers(62, 6, 1024),
        "gpt-oss 20B": layers(24, 2, 128),
        "Mistral 7B v0.1": layers(32, None, 4096),
    }
    text = (ROOT / course_place("hybrid_memory") / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:Gemma|gpt|Mistral).*) \|$", text, re.MULTILINE)
    expected = [row_of(m, shape, n) for m, shape in models.items() for n in (4096, 131072)]
    assert [row.split(" | ") for row in rows] == expected


@pytest.mark.parametrize(("chunk", "blocks"), [(1, 3), (3, 4), (5, 4), (7, 5)])
def test_a_request_holds_what_the_table_says(module_of: ModuleOf, chunk: int, blocks: int) -> None:
    """I3: W - 1 tokens and the chunk, which begin anywhere in a block, and never more."""
    groups = groups_of(8)
    config = EngineConfig(
        max_model_len=400, page_size=4, max_num_batched_tokens=chunk, max_num_seqs=1
    )
    scheduler = module_of("scheduler").Scheduler(config, 200, groups)
    request = make_request("a", [1] * 150, max_tokens=3)
    scheduler.add_request(request)
    most = 0
    while not request.is_finished:
        batch = scheduler.schedule()
        in_window = scheduler.kv_cache.num_pages_of(request) - len(
            scheduler.kv_cache.pages_of(request)
        )
        most = max(most, in_window)
        scheduler.in_flight.advance(batch)
        scheduler.update_from_output(batch, [(1, None)] * len(batch.sampled_indices))
    assert most == blocks == scheduler.kv_cache.allocator.windows[0].most_blocks(chunk)


def test_refusals_point_to_the_page_that_says_what_the_elective_serves(
    module_of: ModuleOf,
) -> None:
    config = EngineConfig(
        model="tiny", device="cpu", max_model_len=64, page_size=4, num_pages=80, max_num_seqs=2
    )
    page = PAGE.read_text(encoding="utf-8").splitlines()
    for model_type in ("mistral", "phimoe", "falcon_h1", "jamba"):
        loaded = subject(model_type, True).loaded
        for name in ("m2_continuous", "m3_paged", "m5_overlap"):
            with pytest.raises(UnsupportedModelError, match=r"MODELS\.md .* hybrid_memory serve"):
                load(name).LLMEngine(config, loaded)
        rows = [line for line in page if line.startswith((f"| {model_type} ", f"| {model_type},"))]
        if rows[-1].endswith("| yes |"):
            module_of("engine").LLMEngine(config, loaded).close()
        else:
            with pytest.raises(UnsupportedModelError, match="is not supported by this engine"):
                module_of("engine").LLMEngine(config, loaded)
