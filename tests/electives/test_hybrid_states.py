"""hybrid_memory: recurrent states, their snapshots, and the prefixes that they resume."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common import EngineConfig, LoadedModel, UnsupportedModelError
from common.hf.tiny import byte_tokenizer
from common.tracing.forced_retractions import force_retractions
from milestones.chain import ROOT, course_place, load
from milestones.lab.instruments.audit import assert_idle
from milestones.lab.instruments.streams import LateStream
from tests.conftest import EngineFactory, ModuleOf
from tests.electives.test_hybrid_memory import PACKAGE, fuzz
from tests.helpers.fake_hybrid import expected_output, groups_of, hybrid_engine
from tests.helpers.oracle import Reference, assert_same_tokens, drain, generate, greedy
from tests.helpers.replaced import plant
from tests.helpers.tiny_configs import tiny_config

pytestmark = pytest.mark.since("hybrid_memory")

# A gated delta net; the same with other projections; attention and Mamba-2 side by side.
MODELS = ("qwen3_next", "qwen3_5_text", "falcon_h1")
PROMPTS = [[5 + 31 * i % 250 for i in range(n)] for n in (25, 1, 21)]
PROMPTS[2][:16] = PROMPTS[0][:16]  # a prefix of four blocks is shared, and then a branch begins
NEW = 6


@functools.cache
def tiny(model_type: str, dtype: str = "float32") -> LoadedModel:
    """Return a random model. The weights never vary."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(model_type)).eval()
    return LoadedModel(f"tiny {model_type}", model.to(getattr(torch, dtype)), byte_tokenizer())


@functools.cache
def reference(model_type: str, prompt: tuple[int, ...]) -> Reference:
    """Return the result of Hugging Face's `generate`."""
    return generate(tiny(model_type), prompt, NEW)


def require_answers(model_type: str, outputs: dict[str, Any]) -> None:
    for output in outputs.values():
        expected = reference(model_type, tuple(output.prompt_token_ids))
        assert_same_tokens(expected, output.outputs[0].token_ids)


def engine_of(make_engine: EngineFactory, model: LoadedModel, **config: Any) -> Any:
    settings = {"max_num_seqs": 3, "max_num_batched_tokens": 12, "num_pages": 60} | config
    return make_engine(model, max_model_len=64, page_size=4, **settings)


@pytest.mark.parametrize(("model_type", "budget"), [*((m, 12) for m in MODELS), (MODELS[0], 3)])
def test_the_answers_of_hugging_face(
    make_engine: EngineFactory, model_type: str, budget: int
) -> None:
    """I1: in chunks, with retractions, aborts and cached prefixes: all tokens are the same."""
    engine = engine_of(make_engine, tiny(model_type), max_num_batched_tokens=budget)
    force_retractions(engine.core.scheduler, 7)
    for round_number in range(2):  # the second time, the prompts are cached
        names = [engine.add_request(prompt, greedy(NEW)) for prompt in PROMPTS]
        aborted = engine.add_request(PROMPTS[0], greedy(NEW))
        for _ in range(3 + round_number):
            engine.step()
        assert engine.abort_request(aborted)
        finals = {name: outputs[-1] for name, outputs in drain(engine).items()}
        require_answers(model_type, {name: finals[name] for name in names})
    assert engine.stats().num_retractions > 0
    cached = [finals[name].metrics.num_cached_tokens for name in names]
    assert cached == [24, 0, 20], "the last end of a block before the end of the prompt"
    assert_idle(engine)


def test_a_failure_in_the_middle_of_a_forward(make_engine: EngineFactory) -> None:
    """I1: the step is undone, but states have its tokens. Their requests start again."""
    engine = engine_of(make_engine, tiny("qwen3_next"))
    forward, calls = engine.core.runner.forward, [0]

    def fails_once(inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = forward(inputs)
        calls[0] += 1
        if calls[0] == 5:  # two prompts are computed, and decode
            raise RuntimeError("the states are advanced, and the step fails")
        return logits

    engine.core.runner.forward = fails_once
    names = [engine.add_request(prompt, greedy(NEW)) for prompt in PROMPTS]
    finals = {name: outputs[-1] for name, outputs in drain(engine).items()}
    assert calls[0] > 5 and finals.keys() == {*names}
    require_answers("qwen3_next", finals)
    assert_idle(engine)


def test_a_request_that_always_fails_ends(make_engine: EngineFactory) -> None:
    """I5: it starts again from a snapshot each time, and chunks that pass do not end the search."""
    engine = engine_of(make_engine, tiny("qwen3_next"), max_num_batched_tokens=3)
    forward = engine.core.runner.forward

    def fails_at_27(inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = forward(inputs)
        if (inputs.position_ids == 27).any():
            raise RuntimeError("the states are advanced, and the step fails")
        return logits

    engine.core.runner.forward = fails_at_27
    victim, *others = [engine.add_request(prompt, greedy(NEW)) for prompt in PROMPTS]
    finals = {name: outputs[-1] for name, outputs in drain(engine).items()}
    assert finals.pop(victim).outputs[0].finish_reason == "error"
    assert finals.keys() == {*others}
    require_answers("qwen3_next", finals)
    assert_idle(engine)


def test_a_flat_batch_and_chunks_have_the_states_of_separate_runs(module_of: ModuleOf) -> None:
    """Convolution and recurrence stop where a request ends, and continue where a chunk ends."""
    pools: Any = module_of("state_pool")
    layer = (model := tiny("qwen3_next").model).get_submodule("model.layers.0.linear_attn")
    torch.manual_seed(1)
    inputs = [torch.randn(1, n, 64) for n in (1, 5, 9)]
    alone, together = (pools.StatePool(model, 3) for _ in range(2))
    with torch.inference_mode():
        for row, tokens in enumerate(inputs):
            with alone.step(pools.StateStep([row], [tokens.shape[1]], [(row, None)])):
                layer(tokens)
        starts = [(row, None) for row in range(3)]
        for part in together.parts.values():
            part.fill_(torch.nan)  # a slot begins with zeros, and not with what was there
        for lens in ([1, 1, 3], [0, 2, 1], [0, 2, 5]):
            rows = [row for row in range(3) if lens[row]]
            done = [tokens[:, : lens[row]] for row, tokens in enumerate(inputs)]
            inputs = [tokens[:, lens[row] :] for row, tokens in enumerate(inputs)]
            step = pools.StateStep(rows, [lens[row] for row in rows], starts, [])
            with together.step(step):
                layer(torch.cat(done, dim=1))
            starts = []
    for part, states in alone.parts.items():
        assert torch.allclose(states[:3], together.parts[part][:3], atol=1e-5), part


def test_a_snapshot_is_not_changed_by_its_readers(make_engine: EngineFactory) -> None:
    """I2: two requests resume from one snapshot, each with its own copy."""
    engine = engine_of(make_engine, tiny("qwen3_next"))
    engine.generate([PROMPTS[0]], greedy(1), progress=False)
    states, (slots,) = engine.core.runner.states, engine.core.scheduler.kv_cache.allocator.states
    kept = [states.num_rows + slot for slot in slots.pages.values()]
    before = [part[kept].clone() for part in states.parts.values()]
    names = [engine.add_request(PROMPTS[0], greedy(NEW)) for _ in range(2)]
    for _ in range(5):
        engine.step()
    after = [part[kept] for part in states.parts.values()]
    assert kept and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    finals = {name: outputs[-1] for name, outputs in drain(engine).items()}
    require_answers("qwen3_next", finals)
    assert [finals[name].metrics.num_cached_tokens for name in names] == [24, 24]


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_chunks_shorter_than_the_convolution(make_engine: EngineFactory, budget: int) -> None:
    """I1: after a hit, chunks of 1 to 3 tokens keep a part of the old inputs.

    The convolution sees four tokens. The first prompt has only its last token left after a hit.
    """
    engine = engine_of(make_engine, tiny("qwen3_next"), max_num_batched_tokens=budget)
    stem, prompts = PROMPTS[0][:16], [[*PROMPTS[0][:16], *tail] for tail in ([9], [8, 7, 6, 5, 4])]
    engine.generate([[*stem, 3]], greedy(1), progress=False)
    cached = []
    for prompt in (prompts[0], prompts[1], prompts[0]):
        (output,) = engine.generate([prompt], greedy(NEW), progress=False)
        cached.append(output.metrics.num_cached_tokens)
        require_answers("qwen3_next", {"": output})
    assert cached[0] == 16 and min(cached) >= 12, "all of them resume from a snapshot"


def test_states_keep_their_precision() -> None:
    """A recurrence is in float32 also with weights of 16 bits, and slots count it as such."""
    pool = load("hybrid_memory", "state_pool").StatePool(tiny("qwen3_next", "bfloat16").model, 1)
    dtypes = {name: state.dtype for (_layer, _index, name), state in pool.parts.items()}
    assert dtypes == {"conv_states": torch.bfloat16, "recurrent_states": torch.float32}
    assert pool.num_bytes == 3 * (192 * 4 * 2 + 4 * 16 * 16 * 4)


def run(engine: Any, prompt: list[int], max_tokens: int = 1) -> Any:
    """Return the final output of a request that runs alone; its tokens must be right."""
    name = engine.add_request(prompt, greedy(max_tokens, ignore_eos=True))
    final = drain(engine)[name][-1]
    groups = groups_of(num_snapshots=4)
    assert final.outputs[0].token_ids == expected_output(groups, prompt, max_tokens)
    return final


def states_engine(module_of: ModuleOf, num_snapshots: int = 4, **config: Any) -> Any:
    groups = groups_of(num_snapshots=num_snapshots)
    return hybrid_engine(module_of("engine"), LateStream(), 40, groups, page_size=4, **config)


def test_a_branch_gets_a_snapshot(module_of: ModuleOf) -> None:
    """The second prompt finds where the tree branches off, and the third one resumes there."""
    engine = states_engine(module_of, num_snapshots=20)
    stem = [1] * 13
    found = [run(engine, [*stem, n, *[2] * 6]).metrics.num_cached_tokens for n in (3, 4, 5)]
    assert found == [0, 0, 12]
    assert run(engine, [*stem, 3, *[2] * 6]).metrics.num_cached_tokens == 16


def test_a_conversation_goes_on_from_its_newest_state(module_of: ModuleOf) -> None:
    engine = states_engine(module_of)
    final = run(engine, [1] * 6, 10)  # 15 tokens are computed, and three blocks are whole
    longer = [*[1] * 6, *final.outputs[0].token_ids, 7]
    assert run(engine, longer).metrics.num_cached_tokens == 12
    # The snapshots at 4 tokens (of the prompt) and at 12; one at 8 was dropped for the newer one.
    blocks = engine.core.scheduler.kv_cache.radix_cache.match_prefix(longer[:12]).prefix_pages()
    (slots,) = engine.core.scheduler.kv_cache.allocator.states
    assert [block in slots.pages for block in blocks] == [True, False, True]


def test_without_slots_nothing_is_cached(module_of: ModuleOf) -> None:
    """I5: snapshots never block a request; and pages without one do not stay."""
    engine = states_engine(module_of, num_snapshots=0)
    assert [run(engine, [1] * 11, 6).metrics.num_cached_tokens for _ in range(2)] == [0, 0]
    assert engine.stats().kv_pages_free == engine.stats().kv_pages_total


def test_the_oldest_snapshot_makes_room(module_of: ModuleOf) -> None:
    engine = states_engine(module_of, num_snapshots=2)
    for n in (1, 2, 1, 3):
        run(engine, [n] * 6)
    found = [run(engine, [n] * 6).metrics.num_cached_tokens for n in (1, 3, 2)]
    assert found == [4, 4, 0]


def test_a_state_is_found_when_its_step_has_ended(module_of: ModuleOf) -> None:
    """I2: abort a prompt with its second chunk in flight. Its first chunk can be resumed."""
    engine = states_engine(module_of, max_num_batched_tokens=8)
    name = engine.add_request([1] * 24, greedy(1))
    engine.step()
    assert len(engine.core.scheduler.in_flight.batches) == 1, "the second chunk is in flight"
    engine.abort_request(name)
    assert run(engine, [1] * 24).metrics.num_cached_tokens == 8


def test_a_request_that_waits_copies_nothing(
    module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3: a prefix is found in each step, but a copy is planned only when the request joins."""
    engine = states_engine(module_of)
    stem = [1] * 12
    run(engine, [*stem, 2])
    engine.add_request([5] * 4, greedy(20, ignore_eos=True))
    engine.step()
    (slots,) = engine.core.scheduler.kv_cache.allocator.states
    name, before = engine.add_request([*stem, 3], greedy(1)), dict(slots.pages)
    take, loads = slots.take_copies, list[Any]()

    def watched() -> Any:
        copies = take()
        loads.extend(copies[0])
        return copies

    with monkeypatch.context() as patch:
        patch.setattr(engine.core.scheduler.admission, "fits", lambda *_: False)
        patch.setattr(slots, "take_copies", watched)
        for _ in range(3):
            engine.step()
        assert loads == [], "a copy for a request that waits"
        assert before.items() <= slots.pages.items(), "its snapshot stays where it was"
        assert engine.abort_request(name)
    drain(engine)
    assert run(engine, [*stem, 3]).metrics.num_cached_tokens == 12


def a_prefix_begins_with_zeros(take_copies: Any, self: Any) -> Any:
    loads, saves = take_copies(self)
    return [(row, None) for row, _snapshot in loads], saves


def a_slot_has_two_blocks(replace: Any, self: Any, blocks: Any, new: Any) -> None:
    kept = dict(self.pages)
    replace(self, blocks, new)
    self.pages.update(kept)


def any_block_is_a_snapshot(_: Any, self: Any, num_tokens: int) -> int:
    return num_tokens // 4


@pytest.mark.parametrize(
    ("method", "mistake"),
    [
        ("take_copies", a_prefix_begins_with_zeros),
        ("replace", a_slot_has_two_blocks),
        ("first_block", any_block_is_a_snapshot),
    ],
)
def test_planted_mistakes_are_caught(
    module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch, method: str, mistake: Any
) -> None:
    """The random schedules of `test_hybrid_memory` find each of these mistakes within 60."""
    plant(monkeypatch, f"{PACKAGE}.state_slots.StateSlots.{method}", mistake)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(60):
            fuzz(module_of("engine"), seed, LateStream)


def test_models_that_are_refused(module_of: ModuleOf) -> None:
    """A state that Hugging Face does not continue exactly is refused, and so is a state alone."""
    for model_type, feature in {
        "jamba": "a later chunk of a prompt does not continue exactly",
        "mamba2": "recurrent state in a cache of its own",
    }.items():
        config = EngineConfig(model="tiny", device="cpu", max_model_len=64, num_pages=80)
        with pytest.raises(UnsupportedModelError, match=feature):
            module_of("engine").LLMEngine(config, tiny(model_type))


def test_the_sizes_of_the_page() -> None:
    """Convolutions are in 16 bits, recurrences in 32; keys and values in 16."""
    config: Any = AutoConfig.for_model("qwen3_next")  # the shape of Qwen3-Next 80B
    layers = config.layer_types.count("linear_attention")
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    conv = (2 * keys + values) * config.linear_conv_kernel_dim
    state = layers * (2 * conv + 4 * values * config.linear_key_head_dim)
    per_token = 2 * config.num_key_value_heads * config.head_dim * 2
    full = config.num_hidden_layers - layers
    assert (layers, config.num_hidden_layers, full, state) == (36, 48, 12, 77_856_768)
    assert state == 3168 * full * per_token
    text = (ROOT / course_place("hybrid_memory") / "README.md").read_text(encoding="utf-8")
    for claim in ("36 of 48 layers", f"{state:,} bytes", "12 layers with full", "3,168 tokens"):
        assert claim in text
