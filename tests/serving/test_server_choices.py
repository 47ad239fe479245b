"""The sampling parameters of `SamplingParams` that JSON writes differently, and n > 1."""

from __future__ import annotations

from typing import Any

import pytest

from common import SamplingParams
from milestones.lab.instruments.audit import assert_idle
from tests.conftest import EngineFactory
from tests.helpers.serving import CHAT, COMPLETE, Serve, call, chat
from tests.serving.test_server_clients import check_aborted

pytestmark = pytest.mark.extra("serve")

SAMPLING: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.0},
    {"repetition_penalty": 1.3},
    {"min_tokens": 12},
    {"logit_bias": {40: 5.0, 7: -100}},
    {"temperature": 0.9, "top_p": 0.8, "seed": 3, "stop": ["zz", "qq"], "top_k": 30, "min_p": 0.01,
     "ignore_eos": True, "stop_token_ids": [7]},
]  # fmt: skip


@pytest.mark.parametrize("fields", SAMPLING, ids=lambda fields: next(iter(fields)))
def test_a_parameter_reaches_the_engine(
    fields: dict[str, Any], make_engine: EngineFactory, serve: Serve
) -> None:
    params = SamplingParams(**{"max_tokens": 16, "temperature": 0, **fields})
    (expected,) = make_engine().generate("Hello", params)
    status, answer, _ = serve().post(COMPLETE, call(**fields))
    (choice,), (output,) = answer["choices"], expected.outputs
    assert (status, choice["text"]) == (200, output.text)
    assert choice["finish_reason"] == output.finish_reason


@pytest.mark.parametrize("path", [COMPLETE, CHAT])
def test_every_choice_is_streamed_once(path: str, make_engine: EngineFactory, serve: Serve) -> None:
    """Each chunk has the index of its choice; role, text and finish reason come once for each."""
    run = serve(make_engine(max_num_seqs=4))
    sampled = {"temperature": 1.2, "seed": 4, "n": 3, "max_tokens": 20}
    body = call(**sampled) if path == COMPLETE else chat(**sampled)
    whole = run.post(path, body)[1]
    texts = [c["text"] if path == COMPLETE else c["message"]["content"] for c in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    *events, last, done = run.events(path, {**body, "stream_options": {"include_usage": True}})
    assert done == "[DONE]" and last["usage"] == {
        **whole["usage"], "prompt_tokens_details": last["usage"]["prompt_tokens_details"],
    }  # fmt: skip
    choices = [event["choices"][0] for event in events]
    for index, text in enumerate(texts):
        own = [choice for choice in choices if choice["index"] == index]
        pieces = [c["text"] if path == COMPLETE else c["delta"].get("content", "") for c in own]
        assert "".join(pieces) == text
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [own[-1]["finish_reason"]]
        assert path == COMPLETE or [c["delta"].get("role") for c in own].count("assistant") == 1


@pytest.mark.since("m5_overlap")
def test_choices_that_end_in_different_steps(serve: Serve) -> None:
    """Each choice ends once, with its own reason, and nothing of it comes after its end."""
    run = serve()
    body = call(temperature=1.2, seed=4, n=3, max_tokens=40, ignore_eos=True)
    texts = [choice["text"] for choice in run.post(COMPLETE, body)[1]["choices"]]
    body["stop"] = [texts[0][3:5], texts[1][12:14]]
    whole = run.post(COMPLETE, body)[1]
    assert [choice["finish_reason"] for choice in whole["choices"]][:2] == ["stop", "stop"]
    assert len({len(choice["text"]) for choice in whole["choices"]}) == 3
    ended, found = dict[int, str](), ["", "", ""]
    for event in run.events(COMPLETE, body)[:-1]:
        (choice,) = event["choices"]
        assert choice["index"] not in ended
        found[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ended[choice["index"]] = choice["finish_reason"]
    assert found == [choice["text"] for choice in whole["choices"]]
    assert [ended[i] for i in range(3)] == [choice["finish_reason"] for choice in whole["choices"]]


@pytest.mark.since("m5_overlap")
def test_several_prompts_with_several_choices(serve: Serve) -> None:
    """Choice i * n + j is output j of prompt i; each prompt counts once in the usage."""
    run = serve()
    sampled = {"temperature": 1.2, "seed": 4, "max_tokens": 6}
    body = call(prompt=["a", "bb"], n=2, echo=True, **sampled)
    answer = run.post(COMPLETE, body)[1]
    alone = [run.post(COMPLETE, call(prompt=p, n=2, **sampled))[1]["choices"] for p in ("a", "bb")]
    expected = ["a" + c["text"] for c in alone[0]] + ["bb" + c["text"] for c in alone[1]]
    assert [choice["text"] for choice in answer["choices"]] == expected
    *events, last, _ = run.events(COMPLETE, {**body, "stream_options": {"include_usage": True}})
    ends = [e["choices"][0]["index"] for e in events if e["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("when", ["queued", "running"])
def test_a_client_with_four_choices_goes_away(
    when: str, make_engine: EngineFactory, serve: Serve
) -> None:
    fields = {"n": 4, "temperature": 1.0, "stream": True}
    check_aborted(make_engine(), serve, fields, when)


@pytest.mark.since("m5_overlap")
def test_choices_take_places(make_engine: EngineFactory, serve: Serve) -> None:
    run = serve(max_open_requests=4)
    assert run.post(COMPLETE, call(n=5, temperature=1))[0] == 400
    assert run.post(COMPLETE, call(n=4, temperature=1))[0] == 200
    assert run.metrics()["vllm:time_to_first_token_seconds_count"] == 1
    run.wait_until(run.is_idle)
    run.in_engine(assert_idle)
