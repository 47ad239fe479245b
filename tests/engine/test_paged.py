"""The paged engine: pages, chunks and retraction change memory and time, but never an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common import LLMEngine, SamplingParams, UnsupportedModelError, memory
from common.tracing.forced_retractions import force_retractions
from tests.conftest import EngineFactory, ModuleOf, shared_model, tokens_in_flight
from tests.helpers.oracle import assert_one_answer, drain, greedy

pytestmark = [pytest.mark.since("m3_paged"), pytest.mark.streams(electives=False), pytest.mark.cpu]

PROMPTS = [[7], list(range(15)), list(range(60, 76)), list(range(100, 117)), [5] * 33, [1, 2]]
UNLIMITED = 2048


@pytest.mark.thorough("sixty sizes on three engines", fast_on=("m3_paged",))
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("chunk", [1, 3, 16, 17, UNLIMITED])
def test_sizes_change_nothing(make_engine: EngineFactory, page_size: int, chunk: int) -> None:
    """Every page, chunk and pool size gives the same answers. Free memory is filled with NaN."""
    longest = 33 + 12
    for spare in (0, 3, 200):
        num_pages = -(-longest // page_size) + spare
        engine = make_engine(
            page_size=page_size, num_pages=num_pages, max_num_batched_tokens=chunk, max_num_seqs=4
        )
        for output in engine.generate(PROMPTS, greedy(12)):
            assert_one_answer("tiny-llama", output, 12)


def retracting(engine: LLMEngine, every: int) -> LLMEngine:
    force_retractions(engine.core.scheduler, every)
    return engine


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("chunk", [4, UNLIMITED])
def test_retraction_at_every_token(make_engine: EngineFactory, every: int, chunk: int) -> None:
    """Tokens, log probabilities and streamed text equal those of a run without retraction."""
    params = [
        greedy(14, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=14, seed=5, top_p=0.9, logprobs=0, ignore_eos=True),
        SamplingParams(max_tokens=14, seed=6, temperature=0.7, ignore_eos=True),
    ]
    prompts = [PROMPTS[1], PROMPTS[3], PROMPTS[0]]
    histories: list[dict[str, Any]] = []
    for engine in (
        make_engine(page_size=4),
        retracting(make_engine(page_size=4, max_num_batched_tokens=chunk), every),
    ):
        for i, prompt in enumerate(prompts):
            engine.add_request(prompt, params[i], f"{i}")
        histories.append(drain(engine))
    assert engine.stats().num_retractions >= 13 // every
    for name, undisturbed in histories[0].items():
        retracted = histories[1][name]
        assert [o.outputs[0].token_ids for o in undisturbed] == [
            o.outputs[0].token_ids for o in retracted
        ], f"I2: retraction changed the tokens of {name}"
        assert [o.outputs[0].text for o in undisturbed] == [o.outputs[0].text for o in retracted]
        first, second = undisturbed[-1].outputs[0].logprobs, retracted[-1].outputs[0].logprobs
        assert (first is None) == (second is None)
        for a, b in zip(first or [], second or [], strict=True):
            assert a.keys() == b.keys() and a == pytest.approx(b, abs=1e-4)


def test_more_requests_than_memory(make_engine: EngineFactory) -> None:
    """A pool with pages for two and a half requests serves ten requests, by retraction."""
    engine = make_engine(page_size=4, num_pages=24, max_num_seqs=10)
    engine.core.scheduler.admission.new_token_ratio = 0.0  # type: ignore[attr-defined]
    prompts = [[i, i + 1, i + 2] for i in range(10)]
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, greedy(33, ignore_eos=True), f"{i}")
    outputs = drain(engine)
    assert engine.stats().num_retractions > 0
    for i, prompt in enumerate(prompts):
        alone = make_engine().generate(prompt, greedy(33, ignore_eos=True))[0]
        assert outputs[f"{i}"][-1].outputs == alone.outputs


@pytest.mark.parametrize("moment", range(12))
def test_abort_of_a_chunked_request(make_engine: EngineFactory, moment: int) -> None:
    """An aborted request leaves nothing, whether queued, chunked, retracted or finished."""
    engine = retracting(make_engine(page_size=4, num_pages=30, max_num_batched_tokens=9), 4)
    engine.add_request(PROMPTS[1], greedy(8), "other")
    engine.add_request(PROMPTS[4], greedy(3, ignore_eos=True), "chunked")
    finals = {}
    for _ in range(moment):
        finals.update({o.request_id: o for o in engine.step()})
    aborted = engine.abort_request("chunked")
    finals.update({name: history[-1] for name, history in drain(engine).items()})
    assert aborted == (finals["chunked"].outputs[0].finish_reason == "abort")
    assert_one_answer("tiny-llama", finals["other"], 8)
    stats = engine.stats()
    assert stats.kv_pages_free + stats.kv_pages_cached == stats.kv_pages_total == 30


def test_no_position_is_padding(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.generate(PROMPTS, greedy(6, ignore_eos=True))
    stats = engine.stats()
    assert stats.padding_tokens == 0
    assert stats.prefill_tokens == sum(map(len, PROMPTS))


def test_a_request_holds_no_page_too_many(make_engine: EngineFactory) -> None:
    engine = make_engine(page_size=4)
    engine.add_request(list(range(9)), greedy(20, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
        stats = engine.stats()
        unwritten = stats.kv_tokens_reserved - stats.kv_tokens_used
        assert 0 <= unwritten - tokens_in_flight(engine) < 4
        held = stats.kv_pages_total - stats.kv_pages_free - stats.kv_pages_cached
        assert held == stats.kv_tokens_reserved // 4


def test_decode_reads_the_live_context_only(
    make_engine: EngineFactory, module_of: ModuleOf
) -> None:
    """A gather is as long as the longest context, and does not depend on limits or the pool."""
    attention = module_of("attention")
    decode, seen = attention.paged_decode, list[torch.Size]()

    def watched(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.extend(group.slots.shape for group in rest[2].decode_groups)
        return decode(query, *rest)

    engine = make_engine(max_model_len=512, num_pages=2000, attention_backend="torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "paged_decode", watched)
        engine.generate([[1] * 10, [2] * 3], greedy(5, ignore_eos=True))
    layers = 2
    assert seen == [(2, 11 + step) for step in range(4) for _ in range(layers)]


@pytest.mark.parametrize("most", [1, 20, 40])
def test_contexts_of_many_lengths_are_gathered_in_groups(
    make_engine: EngineFactory,
    module_of: ModuleOf,
    code_of: ModuleOf,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    """Only the gather of a single request may be larger than allowed. All answers are right."""
    attention, sizes = module_of("attention"), set[int]()
    decode = attention.paged_decode

    def watched(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        groups = rest[2].decode_groups
        rows = [range(len(query)) if group.rows is None else group.rows for group in groups]
        assert sorted(int(row) for group in rows for row in group) == list(range(len(query)))
        sizes.update(group.slots.numel() for group in groups if len(group.slots) > 1)
        return decode(query, *rest)

    monkeypatch.setattr(attention, "paged_decode", watched)
    monkeypatch.setattr(code_of("attention"), "GATHER_SLOTS", most)
    outputs = make_engine(page_size=4, attention_backend="torch").generate(PROMPTS, greedy(6))
    for output in outputs:
        assert_one_answer("tiny-llama", output, 6)
    assert all(size <= most for size in sizes) and bool(sizes) == (most > 1)


def test_the_longest_prompt_while_others_decode(make_engine: EngineFactory) -> None:
    """Each running request gets a token in every step, while a prompt of 400 tokens is chunked."""
    engine = make_engine(max_num_batched_tokens=32, page_size=16)
    for i in range(3):
        engine.add_request([i + 1, 2], greedy(40, ignore_eos=True), f"{i}")
    engine.step()
    engine.add_request([3] * 400, greedy(2, ignore_eos=True), "long")
    live = {"0", "1", "2"}
    while engine.has_unfinished_requests():
        outputs = {output.request_id: output for output in engine.step()}
        assert live <= outputs.keys(), "a decoding request waited for a prompt"
        live -= {name for name, output in outputs.items() if output.finished}


@pytest.mark.before("kv_quant")  # its pages take fewer bytes
def test_the_pool_is_sized_from_memory(
    make_engine: EngineFactory, module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = module_of("kv_pool")
    page_bytes = 16 * 2 * 2 * 2 * 16 * 4  # tokens, keys and values, layers, KV heads, dim, float32
    monkeypatch.setattr(pool, "free_memory", lambda device: 100 * page_bytes + 7)
    assert make_engine(max_model_len=64).stats().kv_pages_total == 16 * 4, "not what 16 rows need"
    assert make_engine(max_model_len=512).stats().kv_pages_total == 100
    monkeypatch.setattr(pool, "free_memory", lambda device: 31 * page_bytes)
    with pytest.raises(RuntimeError, match=r"31 KV pages.*max_model_len=512 takes 32"):
        make_engine(max_model_len=512)


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_what_the_container_leaves(tmp_path: Path, version: int) -> None:
    """The machine has more than the container, which counts caches of files as used."""
    meminfo, files = tmp_path / "meminfo", list(memory.FILES[2 - version])
    meminfo.write_text("MemTotal: 999 kB\nMemAvailable:   700 kB\n")
    assert memory.available_memory(meminfo, tmp_path) == 700 * 1024, "no container"
    limit, usage = (tmp_path / name for name in files)
    limit.parent.mkdir(exist_ok=True)
    usage.write_text("300000\n")
    prefix = "total_" if version == 1 else ""
    (limit.parent / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file 50000\n")
    for most, left in (("400000", 150_000), ("250000", 0), ("max", 700 * 1024), (str(2**62), None)):
        limit.write_text(f"{most}\n")
        expected = 700 * 1024 if left is None else left
        assert memory.available_memory(meminfo, tmp_path) == expected, most


def test_a_model_that_drops_keyword_arguments(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a model cannot be told where the pages are. It is refused when it is loaded."""
    model = shared_model("tiny-gpt2").model
    forward = model.forward

    def deaf(*args: Any, paged: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", deaf)
    with pytest.raises(UnsupportedModelError, match="keyword arguments"):
        make_engine("tiny-gpt2")


def test_models_are_shared_with_other_milestones(make_engine: EngineFactory) -> None:
    """A paged engine leaves the model as it was."""
    loaded = shared_model("tiny-llama")
    before = loaded.model.config._attn_implementation
    make_engine().generate([1, 2, 3], greedy(3))
    assert loaded.model.config._attn_implementation == before
