"""`echo` in completions: with log probabilities of the prompt, and without any new token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import EngineFactory
from tests.helpers.oracle import greedy
from tests.helpers.serving import COMPLETE, MODEL, Running, Serve, call

pytestmark = pytest.mark.extra("serve")

PROMPTS = [[72, 101, 108, 108, 111], [40, 41, 42], [7]]


def merged(run: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices that a client makes of a stream."""
    found: dict[int, dict[str, Any]] = {}
    for event in run.events(COMPLETE, body)[:-1]:
        (choice,) = event["choices"]
        known = found.setdefault(choice["index"], {"text": "", "logprobs": {}})
        known["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            known["logprobs"].setdefault(name, []).extend(values)
        known |= {"index": choice["index"], "finish_reason": choice["finish_reason"]}
    return [found[i] for i in sorted(found)]


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_the_prompt_has_its_log_probabilities(
    max_tokens: int, make_engine: EngineFactory, serve: Serve
) -> None:
    """They are those of the engine. The first token has none. A stream has the same parts."""
    params = greedy(max(1, max_tokens), prompt_logprobs=2, logprobs=2)
    outputs = make_engine().generate(PROMPTS, params)
    run = serve()
    body = call(prompt=PROMPTS, echo=True, logprobs=2, max_tokens=max_tokens)
    status, answer, _ = run.post(COMPLETE, body)
    assert status == 200, answer
    for choice, output, prompt in zip(answer["choices"], outputs, PROMPTS, strict=True):
        (completion,) = output.outputs
        assert output.prompt_logprobs is not None and completion.logprobs is not None
        new = list(zip(completion.token_ids, completion.logprobs, strict=True))[:max_tokens]
        values = [None if row is None else row[t] for t, row in zip(prompt, output.prompt_logprobs)]
        found = choice["logprobs"]
        assert found["token_logprobs"] == [*values, *(row[token] for token, row in new)]
        assert [len(top or ()) for top in found["top_logprobs"]] == [0] + [2] * (
            len(prompt) - 1 + len(new)
        )
        assert found["text_offset"][0] == 0 and len(found["tokens"]) == len(found["text_offset"])
        text = completion.text if max_tokens else ""
        assert (
            choice["text"]
            == run.api.tokens.text(prompt[0])
            + "".join(run.api.tokens.text(token) for token in prompt[1:])
            + text
        )
        assert choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(map(len, PROMPTS))
    assert usage["completion_tokens"] == max_tokens * len(PROMPTS)
    assert merged(run, body) == [
        {name: choice[name] for name in ("index", "text", "logprobs", "finish_reason")}
        for choice in answer["choices"]
    ]


def test_only_the_prompt(serve: Serve) -> None:
    """`max_tokens` 0 needs `echo`, because an answer without both would be empty."""
    run = serve()
    status, answer, _ = run.post(COMPLETE, call(prompt="Hello", echo=True, max_tokens=0))
    assert status == 200 and answer["choices"][0]["text"] == "Hello"
    assert answer["choices"][0]["logprobs"] is None and answer["usage"]["completion_tokens"] == 0
    assert merged(run, call(prompt="Hello", echo=True, max_tokens=0))[0]["text"] == "Hello"
    status, answer, _ = run.post(COMPLETE, call(prompt="Hello", max_tokens=0))
    assert status == 400 and answer["error"]["param"] == "max_tokens"


@pytest.mark.since("m5_overlap")
def test_each_choice_of_a_prompt_begins_with_it(serve: Serve) -> None:
    run = serve()
    body = call(prompt=["ab", "cde"], n=2, echo=True, logprobs=0, temperature=1.0, seed=3)
    answer = run.post(COMPLETE, body)[1]
    prompts = ["ab", "ab", "cde", "cde"]
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        assert choice["text"].startswith(prompt)
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["tokens"][: len(prompt)] == [*prompt]
    assert [c["text"] for c in merged(run, body)] == [c["text"] for c in answer["choices"]]


@pytest.mark.since("m5_overlap")
def test_the_official_client_reads_it(serve: Serve) -> None:
    client: Any = serve().client()
    answer = client.completions.create(
        model=MODEL, prompt="Hello", echo=True, logprobs=1, max_tokens=0
    )
    found = answer.choices[0].logprobs
    assert found.token_logprobs[0] is None and len(found.token_logprobs) == 5
    assert all(value <= 0 for value in found.token_logprobs[1:])
