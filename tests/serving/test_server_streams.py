"""Server-sent events, log probabilities and usage, on the highest milestone."""

from __future__ import annotations

from typing import Any

import pytest

from common import SamplingParams
from milestones.lab.instruments.audit import assert_idle
from tests.conftest import EngineFactory
from tests.helpers.serving import CHAT, COMPLETE, Serve, call, chat, read

pytestmark = [pytest.mark.extra("serve"), pytest.mark.since("m5_overlap")]


def test_the_events_of_a_chat(serve: Serve) -> None:
    run = serve()
    events = run.events(CHAT, chat(stream_options={"include_usage": True}))
    assert events.pop() == "[DONE]"
    last = events.pop()
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 16
    assert all(event["usage"] is None for event in events)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [e["choices"][0]["finish_reason"] for e in events if
            e["choices"][0]["finish_reason"]] == ["length"]  # fmt: skip
    assert len({event["id"] for event in events}) == 1
    for options in ({}, {"include_usage": False}, None):
        events = run.events(CHAT, chat(stream_options=options))
        assert all("usage" not in event for event in events[:-1])
    assert events.count("[DONE]") == 1


def test_every_cut_of_an_output_is_streamed_whole(serve: Serve) -> None:
    """The deltas join to the text without stream, wherever `max_tokens` cuts a character."""
    run = serve()
    for max_tokens in range(1, 25):
        sampled = call(max_tokens=max_tokens, temperature=1.5, seed=max_tokens, ignore_eos=True)
        whole = run.post(COMPLETE, sampled)[1]["choices"][0]
        pieces = [event["choices"][0] for event in run.events(COMPLETE, sampled)[:-1]]
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        assert pieces[-1]["finish_reason"] == whole["finish_reason"] == "length"


def test_a_stop_string_is_never_sent(make_engine: EngineFactory, serve: Serve) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5)
    text = make_engine().generate("Hello", params)[0].outputs[0].text
    run = serve()
    for start in range(0, len(text) - 3, 3):
        stop = text[start : start + 3]
        body = call(max_tokens=40, temperature=1.0, seed=5, stop=stop)
        choices = [event["choices"][0] for event in run.events(COMPLETE, body)[:-1]]
        assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
        assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_an_entry_for_each_token(
    stream: bool, make_engine: EngineFactory, serve: Serve
) -> None:
    """Also where the text is held back. The bytes of half a character are the token's own."""
    (output,) = make_engine().generate(
        "Hello", SamplingParams(max_tokens=16, temperature=0, logprobs=2)
    )
    expected = output.outputs[0]
    assert expected.logprobs is not None
    chosen = [expected.logprobs[i][t] for i, t in enumerate(expected.token_ids)]
    run = serve()

    def choices(path: str, body: dict[str, Any]) -> list[Any]:
        if stream:
            return [event["choices"][0] for event in run.events(path, body)[:-1]]
        return [run.post(path, body)[1]["choices"][0]]

    parts = [c["logprobs"] for c in choices(COMPLETE, call(logprobs=2)) if c["logprobs"]]
    values = [value for part in parts for value in part["token_logprobs"]]
    assert values == pytest.approx(chosen)
    assert all(len(top) == 2 for part in parts for top in part["top_logprobs"])
    offsets = [offset for part in parts for offset in part["text_offset"]]
    assert offsets == sorted(offsets) and len(offsets) == len(chosen)

    (reference,) = make_engine().chat(
        [{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=16, temperature=0)
    )
    parts = [c["logprobs"] for c in choices(CHAT, chat(logprobs=True, top_logprobs=1))]
    rows = [row for part in parts if part for row in part["content"]]
    joined = bytes(byte for row in rows for byte in row["bytes"])
    assert len(rows) == len(reference.outputs[0].token_ids)
    assert joined.decode("utf-8", "replace") == reference.outputs[0].text
    assert all(row["top_logprobs"][0]["logprob"] >= row["logprob"] - 1e-6 for row in rows)
    assert any(bytes(row["bytes"]) != b"\xef\xbf\xbd" and row["token"] == "\ufffd" for row in rows)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Hello", [40, 41, 42], ["a", "b"]])
def test_echo_puts_the_prompt_first(stream: bool, prompt: Any, serve: Serve) -> None:
    run = serve()
    plain = run.post(COMPLETE, call(prompt=prompt))[1]["choices"]
    count = len(plain)
    asked = run.post("/detokenize", {"tokens": prompt})[1]["prompt"] if prompt[0] == 40 else None
    texts = [asked] if asked else [prompt] if isinstance(prompt, str) else prompt
    body = call(prompt=prompt, echo=True)
    if stream:
        found = [""] * count
        for event in run.events(COMPLETE, body)[:-1]:
            found[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        found = [choice["text"] for choice in run.post(COMPLETE, body)[1]["choices"]]
    assert found == [text + choice["text"] for text, choice in zip(texts, plain, strict=True)]


def test_tokenize_and_detokenize(serve: Serve) -> None:
    run = serve()
    status, answer, _ = run.post("/tokenize", {"prompt": "Hello \U0001f600"})
    assert status == 200 and answer["count"] == len(answer["tokens"]) == 10
    assert answer["max_model_len"] == 512
    assert run.post("/detokenize", {"tokens": answer["tokens"]})[1] == {
        "prompt": "Hello \U0001f600"
    }
    talk = [{"role": "user", "content": "Hi"}]
    assert run.post("/tokenize", {"messages": talk})[1]["count"] > 4
    assert run.post("/tokenize", {})[0] == 400
    assert run.post("/detokenize", {"tokens": [10**9]})[0] == 400


def test_a_request_that_cannot_be_computed_ends_alone(
    make_engine: EngineFactory, serve: Serve
) -> None:
    """Its client gets an error, as a status or as the last event; its neighbour is not changed."""
    params = SamplingParams(max_tokens=16, temperature=0)
    expected = make_engine().generate("Hello", params)
    engine: Any = make_engine()
    update = engine.core.scheduler.update_from_output

    def failing(batch: Any, sampled: list[Any]) -> Any:
        requests = getattr(batch, "sampled_requests", batch.requests)
        for place, request in enumerate(requests):
            if request.params.seed == 13 and len(request.output_token_ids) == 3:
                sampled[place] = (None, None)
        return update(batch, sampled)

    engine.core.scheduler.update_from_output = failing
    run = serve(engine)
    neighbour = run.open(COMPLETE, call())
    status, answer, _ = run.post(COMPLETE, call(seed=13))
    assert status == 500 and "not finite" in answer["error"]["message"]
    events = run.events(COMPLETE, call(seed=13))
    assert "not finite" in events[-1]["error"]["message"] and "[DONE]" not in events
    assert events[0]["choices"][0]["text"] is not None
    from openai import APIError

    with pytest.raises(APIError, match="not finite"):
        list(run.client().completions.create(**call(seed=13), stream=True))
    read(neighbour, b"length")
    assert run.post(COMPLETE, call())[1]["choices"][0]["text"] == expected[0].outputs[0].text
    run.wait_until(run.is_idle)
    run.in_engine(assert_idle)
