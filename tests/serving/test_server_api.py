"""OpenAI's own client on every milestone: the answers are those of the engine without a server."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from common import LLMEngine, SamplingParams
from tests.conftest import ROOT, EngineFactory
from tests.helpers.serving import MODEL, Serve

pytestmark = pytest.mark.extra("serve")

PROMPTS = ["Hello", "a" * 40, "two prompts", "x", "The sea \u2014 \U0001f600", "one more of them"]
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


def greedy(max_tokens: int = 24, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": max_tokens, "temperature": 0, **fields}


def texts_of(engine: LLMEngine, max_tokens: int = 24) -> list[str]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return [output.outputs[0].text for output in engine.generate(PROMPTS, params)]


def test_completions_are_the_engines(make_engine: EngineFactory, serve: Serve) -> None:
    expected = texts_of(make_engine())
    run = serve()
    client = run.client()
    assert [card.id for card in client.models.list()] == [MODEL]
    whole = [client.completions.create(prompt=p, **greedy()).choices[0] for p in PROMPTS]
    assert [choice.text for choice in whole] == expected
    together = client.completions.create(prompt=PROMPTS, **greedy())
    assert [choice.text for choice in together.choices] == expected
    assert [choice.index for choice in together.choices] == list(range(len(PROMPTS)))
    ids = run.api.prompts._inputs.tokenizer.encode(PROMPTS[0])
    assert client.completions.create(prompt=ids, **greedy()).choices[0].text == expected[0]
    pieces = [chunk.choices[0].text for chunk in
              client.completions.create(prompt=PROMPTS[0], stream=True, **greedy())]  # fmt: skip
    assert "".join(pieces) == expected[0] and len(pieces) > 1


def test_chats_are_the_engines(make_engine: EngineFactory, serve: Serve) -> None:
    params = SamplingParams(max_tokens=20, temperature=0)
    (expected,) = make_engine().chat(TALK, params)
    chat = serve().client().chat.completions
    whole = chat.create(messages=TALK, **greedy(20))
    assert whole.choices[0].message.content == expected.outputs[0].text
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert whole.usage.completion_tokens == len(expected.outputs[0].token_ids)
    parts = [{**TALK[0], "content": [{"type": "text", "text": "Be "},
                                     {"type": "text", "text": "brief."}]}, TALK[1]]  # fmt: skip
    chunks = list(
        chat.create(messages=parts, stream=True, stream_options={"include_usage": True},
                    **greedy(20))
    )  # fmt: skip
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.prompt_tokens_details
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == expected.outputs[0].text
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]


def test_the_prefix_cache_is_seen_in_the_usage(serve: Serve) -> None:
    run = serve()
    client = run.client()
    usages = [client.completions.create(prompt="b" * 60, **greedy(4)).usage for _ in range(2)]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    has_tree = run.in_engine(lambda engine: engine.stats()).kv_pages_cached > 0
    assert cached[0] == 0 and (cached[1] > 0) is has_tree


@pytest.mark.parametrize("page", ["README.md", "milestones/docs/SERVING.md"])
def test_the_curl_commands_of_the_pages(page: str, serve: Serve) -> None:
    run = serve()
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^curl localhost:8000(.*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        path, *options = shlex.split(command)
        values = dict(zip(options[::2], options[1::2], strict=True))
        assert values.keys() <= {"-H", "-d"}
        if "-d" in values:
            assert values["-H"] == "Content-Type: application/json"
            status, answer, _ = run.post(path, values["-d"].encode())
        else:
            status, answer = run.get(path)
        assert status == 200, answer
