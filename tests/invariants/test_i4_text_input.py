"""I4: text, messages and ids that a tokenizer, a chat template or a log cannot use are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from common import LLMEngine, LoadedModel, TokensPrompt
from common.hf.tiny import byte_tokenizer
from tests.conftest import assert_idle, build_engine, shared_model
from tests.helpers.oracle import greedy

MESSAGE = {"role": "user", "content": "hi"}


def engine_with(tokenizer: PreTrainedTokenizerBase, max_model_len: int = 64) -> LLMEngine:
    """Return an engine on the tiny model. The code under test is the same in all milestones."""
    loaded: LoadedModel = replace(shared_model("tiny-llama"), tokenizer=tokenizer)
    return build_engine("m2_continuous", loaded, max_model_len=max_model_len)


def words_tokenizer(vocab: dict[str, int], unknown: str | None = None) -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.WordLevel(vocab=vocab, unk_token=unknown or "[none]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


class Untouched:
    """A tokenizer that must not be asked to encode."""

    chat_template = "there is one"

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "abcd": 1}

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return "".join(message["content"] for message in messages)

    def encode(self, text: str, **_: Any) -> list[int]:
        raise AssertionError(f"I4: {len(text)} characters were tokenized")


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("prompt", lambda e, text: e.add_request(text)),
        ("prompt", lambda e, text: e.generate([text])),
        ("messages", lambda e, text: e.chat([{"role": "user", "content": text}])),
    ],
)
def test_a_long_text_is_refused_before_it_is_tokenized(
    field: str, call: Callable[[LLMEngine, str], object]
) -> None:
    """Tokenizing a hundred megabytes would stop all other requests for a minute."""
    engine = engine_with(byte_tokenizer())
    engine.input_processor.tokenizer = Untouched()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=f"{field} must have at most 65536 char.*max_model_len=64"):
        call(engine, "ab" * 40_000)
    assert_idle(engine)


def test_long_tokens_may_make_a_long_prompt() -> None:
    """A text is refused by its length alone only if it could never fit."""
    word = "a" * 2000
    engine = engine_with(words_tokenizer({word: 5, "b": 6}))
    prompt = " ".join([word] * 63)
    assert len(prompt) > 2**16
    output = engine.generate(prompt, greedy(1))[0]
    assert output.prompt_token_ids == [5] * 63


def test_a_prompt_a_little_too_long_is_told_its_tokens() -> None:
    with pytest.raises(ValueError, match="prompt has 1000 tokens.*max_model_len=64"):
        engine_with(byte_tokenizer()).add_request("a" * 1000)


def test_text_that_the_tokenizer_cannot_encode() -> None:
    """The vocabulary has no token for unknown words."""
    engine = engine_with(words_tokenizer({"a": 0}))
    with pytest.raises(ValueError, match="prompt: this model's tokenizer cannot encode 'a b'"):
        engine.add_request("a b")
    assert_idle(engine)


@pytest.mark.parametrize("prompt", [" ", "\t\n"])
def test_text_without_tokens(prompt: str) -> None:
    with pytest.raises(ValueError, match="prompt must not be empty: it has no tokens"):
        engine_with(words_tokenizer({"a": 0})).add_request(prompt)


def test_tokens_that_the_model_does_not_have() -> None:
    """A tokenizer may have more tokens than the embedding has rows."""
    engine = engine_with(words_tokenizer({"a": 0, "b": 700}))
    with pytest.raises(ValueError, match="prompt holds token id 700, outside .*259"):
        engine.add_request("a b")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('system first, please') }}", "refuses them: system first, please"),
        ("{{ messages[7].content }}", "refuses them: .*no element 7"),
        ("{{ messages + 1 }}", "refuses them"),
        ("{{ 1 // 0 }}", "refuses them: .*zero"),
        ("{% for x in %}", "refuses them"),
        ("{{ no_such_function() }}", "refuses them: .*undefined"),
        ("{# nothing #}", "messages: .* no text"),
        ("\ud800", "messages must be valid Unicode.*ud800.*character 0"),
    ],
)
def test_a_chat_template_that_does_not_work(template: str | None, message: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    engine = engine_with(tokenizer)
    with pytest.raises(ValueError, match=message):
        engine.chat([MESSAGE], greedy(1))
    assert_idle(engine)


def test_a_template_that_writes_the_first_token_gives_it_once() -> None:
    """The tokenizer adds the token to a text. A chat has it already, from its template."""
    tokenizer, name = byte_tokenizer(), "<|im_start|>"
    first = tokenizer.convert_tokens_to_ids(name)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", special_tokens=[(name, first)]
    )
    tokenizer.chat_template = name + "{{ messages[0].content }}"
    inputs = engine_with(tokenizer).input_processor
    expected = [first, *tokenizer.encode("hi", add_special_tokens=False)]
    assert inputs.tokenize("hi", num_outputs=1).prompt_token_ids == expected
    assert inputs.apply_chat_template([MESSAGE]).prompt_token_ids == expected


def test_request_ids() -> None:
    """Ids are written to logs and traces, so they must be valid text of bounded length."""
    engine = engine_with(byte_tokenizer())
    for good in ("a", " ", "ü/😀\n", "x" * 1000):
        assert engine.add_request([1], greedy(1), good) == good
        assert engine.abort_request(good)
    for bad, message in (
        ("", "non-empty"),
        ("x" * 2**20, "at most 1000 characters, got 1048576"),
        ("\udfff", "valid Unicode"),
    ):
        with pytest.raises(ValueError, match=f"request_id must .*{message}"):
            engine.add_request([1], greedy(1), bad)
    engine.step()
    assert_idle(engine)


def test_a_prompt_of_tokens_keeps_its_text() -> None:
    output = engine_with(byte_tokenizer()).generate(TokensPrompt([5, 6], "ab"), greedy(1))[0]
    assert (output.prompt, output.prompt_token_ids) == ("ab", [5, 6])


def test_the_largest_max_tokens_is_no_size() -> None:
    """`max_tokens` is a limit: no memory of that size is allocated."""
    output = engine_with(byte_tokenizer()).generate([1], greedy(2**63 - 1, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 63
