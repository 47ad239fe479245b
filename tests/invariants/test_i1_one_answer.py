"""I1: greedy output equals `model.generate(do_sample=False)`, token for token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.hf.tiny import ARCHITECTURES, VISION
from tests.conftest import EngineFactory, build_engine, plain_model, shared_model
from tests.helpers.oracle import (
    assert_one_answer,
    assert_same_tokens,
    generate,
    greedy,
    reference,
    serve_arrivals,
)

pytestmark = [pytest.mark.streams, pytest.mark.cpu]

PROMPTS = [[7], [1, 2], list(range(40, 57)), list(range(200, 160, -1)), [9, 9, 9], [72, 105]]
LENGTHS = [24, 1, 9, 17, 30, 2]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES | VISION))
def test_many_at_once_equal_generate(make_engine: EngineFactory, architecture: str) -> None:
    """There are more requests than rows. Requests join, leave, and reuse memory of others."""
    model = f"tiny-{architecture}"
    engine = make_engine(model, max_num_seqs=4)
    outputs = engine.generate(PROMPTS, [greedy(length) for length in LENGTHS])
    for output, length in zip(outputs, LENGTHS, strict=True):
        assert_one_answer(model, output, length)


def test_the_instrument_is_sharp() -> None:
    """The tiny models' output varies. A model that repeats one token would hide a wrong cache."""
    for architecture in ARCHITECTURES:
        tokens = reference(f"tiny-{architecture}", tuple(PROMPTS[2]), 20).token_ids
        assert len(set(tokens)) > min(6, len(tokens) - 1), (architecture, tokens)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES | VISION))
def test_faster_modules_compute_the_same(architecture: str) -> None:
    """The loader's passes leave the logits of the plain model unchanged, for many batch sizes."""
    plain, ours = plain_model(f"tiny-{architecture}"), shared_model(f"tiny-{architecture}")
    for rows in (1, 2, 5, 6, 15, 16, 17, 63, 64, 65, 100):
        tokens = torch.randint(0, 256, (rows, 1), generator=torch.Generator().manual_seed(rows))
        with torch.inference_mode():
            expected, got = plain.model(tokens).logits, ours.model(tokens).logits
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def test_one_token_needs_no_decode(make_engine: EngineFactory) -> None:
    engine = make_engine()
    output = engine.generate([5, 6, 7], greedy(1))[0]
    assert_one_answer("tiny-llama", output, 1)
    assert engine.stats().num_steps == 1
    assert engine.stats().decode_tokens == 0


def test_logprobs_are_the_models_own(make_engine: EngineFactory) -> None:
    """The log probabilities of the chosen and the three best tokens are the model's own."""
    engine = make_engine()
    plain, mixed = engine.generate([PROMPTS[2], PROMPTS[3]], [greedy(8, logprobs=3), greedy(8)])
    expected = reference("tiny-llama", tuple(PROMPTS[2]), 8)
    assert mixed.outputs[0].logprobs is None
    assert plain.outputs[0].logprobs is not None
    for token_id, got, logprobs in zip(
        plain.outputs[0].token_ids, plain.outputs[0].logprobs, expected.logprobs, strict=True
    ):
        assert set(got) == set(logprobs.topk(3).indices.tolist()) and token_id in got
        for candidate, value in got.items():
            assert value == pytest.approx(float(logprobs[candidate]), abs=1e-4)


def test_logprobs_zero_gives_the_chosen_token_alone(make_engine: EngineFactory) -> None:
    completion = make_engine().generate([1, 2, 3], greedy(4, logprobs=0))[0].outputs[0]
    assert completion.logprobs is not None
    assert [list(entry) for entry in completion.logprobs] == [[t] for t in completion.token_ids]


def test_end_of_sequence_stops_and_is_kept(make_engine: EngineFactory) -> None:
    """Any of several EOS ids ends a request. Config and tokenizer may have different ids."""
    loaded = shared_model("tiny-llama")
    prompt = PROMPTS[2]
    tokens = reference("tiny-llama", tuple(prompt), 20).token_ids
    eos = tokens[5]
    model_config = loaded.model.generation_config
    original = model_config.eos_token_id
    model_config.eos_token_id = [eos, 258]
    try:
        assert loaded.eos_token_ids == {eos, 258, loaded.tokenizer.eos_token_id}
        engine = make_engine()
        stopped, ignored = engine.generate(
            [prompt, prompt], [greedy(20), greedy(20, ignore_eos=True)]
        )
    finally:
        model_config.eos_token_id = original
    assert stopped.outputs[0].token_ids == tokens[: tokens.index(eos) + 1]
    assert stopped.outputs[0].finish_reason == "stop"
    assert ignored.outputs[0].token_ids == tokens
    assert ignored.outputs[0].finish_reason == "length"


def test_stop_token_ids_stop(make_engine: EngineFactory) -> None:
    tokens = reference("tiny-llama", tuple(PROMPTS[2]), 20).token_ids
    stop = tokens[7]
    first = tokens.index(stop)
    params = greedy(20, stop_token_ids=[stop], ignore_eos=True)
    output = make_engine().generate([PROMPTS[2]], params)[0].outputs[0]
    assert output.token_ids == tokens[: first + 1]
    assert output.finish_reason == "stop"
    tokenizer = shared_model("tiny-llama").tokenizer
    assert output.text == tokenizer.decode(tokens[:first], skip_special_tokens=True)


def test_output_ends_where_the_model_does(make_engine: EngineFactory) -> None:
    """At `max_model_len` a request ends by length, and its last token is kept."""
    engine = make_engine(max_model_len=24)
    output = engine.generate([PROMPTS[2]], greedy(100, ignore_eos=True))[0]
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 24
    assert output.outputs[0].finish_reason == "length"
    expected = reference("tiny-llama", tuple(PROMPTS[2]), 7)
    assert_same_tokens(expected, output.outputs[0].token_ids)


def test_grouped_query_attention_with_one_kv_head_per_three(make_engine: EngineFactory) -> None:
    """The model has nine query heads and three KV heads, like the embedded model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    loaded = shared_model("tiny-llama")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=259, hidden_size=72, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=256,
            initializer_range=0.3, eos_token_id=256, bos_token_id=None,
        )  # fmt: skip
        other = replace(loaded, name="nine-three", model=LlamaForCausalLM(config).eval())
    engine = make_engine(other, max_num_seqs=3)
    for output in engine.generate(PROMPTS, greedy(12)):
        expected = generate(other, tuple(output.prompt_token_ids), 12)
        assert_same_tokens(expected, output.outputs[0].token_ids)


def test_requests_that_join_late_equal_generate(make_engine: EngineFactory) -> None:
    engine = make_engine(max_num_seqs=3)
    params = map(greedy, LENGTHS)
    outputs = serve_arrivals(engine, [*zip([0, 1, 2, 5, 6, 11], PROMPTS, params, strict=True)])
    for i, length in enumerate(LENGTHS):
        assert_one_answer("tiny-llama", outputs[f"{i}"], length)


@pytest.mark.before("m2_continuous")
def test_the_cache_saves_quadratic_work(make_engine: EngineFactory, milestone: str) -> None:
    """Without the cache, the answer is the same, but every step computes all tokens again."""
    from m1_single import LLMEngine

    with_cache = make_engine()
    without = LLMEngine(with_cache.config, with_cache.loaded, use_cache=False)
    prompt, n = PROMPTS[2], 20
    params = greedy(n, ignore_eos=True)
    assert (
        with_cache.generate(prompt, params)[0].outputs
        == without.generate(prompt, params)[0].outputs
    )
    stats = with_cache.stats()
    assert (stats.prefill_tokens, stats.decode_tokens) == (len(prompt), n - 1)
    stats = without.stats()
    computed = stats.prefill_tokens + stats.decode_tokens
    assert computed == sum(len(prompt) + i for i in range(n))


def test_a_context_grows_beyond_what_is_read_at_once(milestone: str) -> None:
    """The context grows beyond 256 tokens, the length of the parts in which kernels read it."""
    engine = build_engine(milestone, "tiny-llama")
    (output,) = engine.generate([[i % 90 + 5 for i in range(250)]], greedy(40))
    assert_one_answer("tiny-llama", output, 40)
