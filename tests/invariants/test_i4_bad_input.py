"""I4: bad input is refused with an error that names the field. Other requests do not change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from common import EngineConfig, LLMEngine, SamplingParams
from tests.conftest import EngineFactory
from tests.helpers.oracle import assert_one_answer, drain, greedy

BAD_PARAMS: dict[str, list[Any]] = {
    "max_tokens": [0, -3, 2.5, True],
    "temperature": [-0.1, math.nan, math.inf, "hot", 10**400],
    "top_k": [-1, 1.5, 2**63],
    "top_p": [0.0, 1.01, math.nan],
    "min_p": [-0.01, 1.5],
    "seed": [2**63, "lucky"],
    "stop": [5, "", ["fine", ""], [7]],
    "stop_token_ids": [1.5, [-1], ["a"], 5],
    "logprobs": [-1],
    "ignore_eos": [1],
    "skip_special_tokens": [None],
}
TOLD_PARAMS: list[tuple[str, dict[str, Any]]] = [  # with the limit that the message must have
    ("logprobs must be between 0 and 1000, got 1001", {"logprobs": 1001}),
    ("max_tokens must be between 1 and 9223372036854775807, got 9223", {"max_tokens": 2**63}),
    ("stop must be valid Unicode text, got '.ud800'", {"stop": "a\ud800"}),
    ("stop_token_ids must be a list of integers, got b'ab'", {"stop_token_ids": b"ab"}),
    ("stop_token_ids must be between 0 and", {"stop_token_ids": [2**63]}),
    ("ignore_eos must be one of True, False, got array", {"ignore_eos": np.array([True, False])}),
    ("top_k must be an integer, .* got tensor", {"top_k": torch.tensor([1, 2])}),
    ("presence_penalty must be in .-2.0, 2.0., got 2.5", {"presence_penalty": 2.5}),
    ("presence_penalty must be a finite number", {"presence_penalty": float("nan")}),
    ("frequency_penalty must be in .-2.0, 2.0., got -3", {"frequency_penalty": -3}),
    ("repetition_penalty must be in .0.01, 100.0., got 0", {"repetition_penalty": 0}),
    ("repetition_penalty", {"repetition_penalty": float("inf")}),
    ("min_tokens must be between 0", {"min_tokens": -1}),
    ("min_tokens must be at most max_tokens=4, got 5", {"min_tokens": 5, "max_tokens": 4}),
    ("n must be between 1 and 1000, got 0", {"n": 0}),
    ("n must be between 1 and 1000, got 1001", {"n": 1001}),
    ("n must be an integer", {"n": 2.0}),
    ("logit_bias must be a dict .* got .1, 2.", {"logit_bias": [1, 2]}),
    ("logit_bias: a token id must be an integer.* got '5'", {"logit_bias": {"5": 1.0}}),
    ("logit_bias: a token id must be between 0", {"logit_bias": {-1: 1.0}}),
    ("logit_bias: a value must be in .-100.0, 100.0., got 101", {"logit_bias": {1: 101}}),
    ("logit_bias: a value must be a finite number", {"logit_bias": {1: float("nan")}}),
    ("logit_bias must have at most 10000 tokens", {"logit_bias": dict.fromkeys(range(10001), 1)}),
]
BAD_CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("device must be 'auto', 'cpu', .* got 'cpu:x'", {"device": "cpu:x"}),
    ("model must be valid Unicode text", {"model": "\ud800"}),
    ("model must not contain a null character", {"model": "a\0"}),
    ("max_num_seqs must be between 1 and 65536", {"max_num_seqs": 2**63}),
    ("num_pages must be between 1 and 2147483647", {"num_pages": 2**31}),
    ("emulated_forward_ms must be in .*60000", {"emulated_forward_ms": 1e300}),
    *((field, {field: value}) for field, value in {
        "model": "", "dtype": "int8", "device": "", "max_num_seqs": 0, "max_model_len": 1,
        "max_num_batched_tokens": 0, "page_size": 0, "num_pages": 0, "attention_backend": "cuda",
        "schedule_policy": "best", "enable_overlap": "yes", "seed": 1.5,
    }.items()),
]  # fmt: skip
HELLO = {"role": "user", "content": "hello"}
Refused = Callable[[LLMEngine], object]
BAD_REQUESTS: list[tuple[str, str, Refused]] = [
    ("empty text", "prompt", lambda e: e.add_request("")),
    ("no tokens", "prompt", lambda e: e.add_request([])),
    ("negative token", "prompt.*-1.*259", lambda e: e.add_request([1, -1])),
    ("token too large", "prompt.*259.*vocabulary", lambda e: e.add_request([1, 259])),
    ("token not an int", "prompt", lambda e: e.add_request([1, 2.5])),  # type: ignore[list-item]
    ("token a bool", "prompt", lambda e: e.add_request([True])),
    ("prompt not a prompt", "prompt", lambda e: e.add_request(5)),  # type: ignore[arg-type]
    ("bytes", "prompt", lambda e: e.add_request(b"hello")),
    ("bytes to generate", "prompts", lambda e: e.generate(b"hello")),
    ("a dict", "prompt", lambda e: e.generate({"text": "x"})),
    ("prompt too long", "64.*max_model_len=64", lambda e: e.add_request([1] * 64)),
    ("id in flight", "request_id.*busy", lambda e: e.add_request([1], None, "busy")),
    ("id not a string", "request_id", lambda e: e.add_request([1], None, 7)),  # type: ignore[arg-type]
    ("params of another kind", "params", lambda e: e.add_request([1], {})),  # type: ignore[arg-type]
    (
        "stop token too large",
        "stop_token_ids.*259",
        lambda e: e.add_request([1], SamplingParams(stop_token_ids=[259])),
    ),
    (
        "more logprobs than tokens",
        "logprobs.*259",
        lambda e: e.add_request([1], SamplingParams(logprobs=260)),
    ),
    ("params of another number", "params", lambda e: e.generate([[1], [2]], [greedy(1)])),
    ("one bad prompt of three", "prompt", lambda e: e.generate([[1], [999], [2]], greedy(4))),
    ("no messages", "messages", lambda e: e.chat([])),
    ("no role", "messages", lambda e: e.chat([{"content": "hi"}])),
    ("one message", "messages must be a list", lambda e: e.chat({"role": "user", "content": "a"})),  # type: ignore[arg-type]
    ("messages a number", "messages must be a list.*got 5", lambda e: e.chat(5)),  # type: ignore[arg-type]
    ("messages from a generator", "messages must be a list", lambda e: e.chat(m for m in [HELLO])),  # type: ignore[arg-type]
    ("prompts from a generator", "prompts must be a list", lambda e: e.generate(t for t in "ab")),  # type: ignore[arg-type]
    ("params a number", "params must be a list of Samp.*got 5", lambda e: e.generate([1], 5)),  # type: ignore[arg-type]
    ("params from a generator", "params must be a list", lambda e: e.generate([1], iter([None]))),  # type: ignore[arg-type]
    ("no content", "content.*None", lambda e: e.chat([{"role": "user", "content": None}])),
    ("role a number", "role.*got 5", lambda e: e.chat([{"role": 5, "content": "a"}])),
    ("half a pair", "prompt must be valid Unicode", lambda e: e.add_request("a\ud800")),
    ("in a chat", "messages.*Unicode", lambda e: e.chat([{**HELLO, "content": "\udfff"}])),
    ("a huge token id", "prompt holds token id 9223", lambda e: e.add_request([1, 2**63])),
    ("no end of tokens", "prompt has 9223.*len=64", lambda e: e.add_request(range(2**100))),
    ("no end of prompts", "prompt has 1000000.*len=64", lambda e: e.generate(range(10**12))),
    ("empty id", "request_id must be a non-empty", lambda e: e.add_request([1], None, "")),
    ("bad stream", "prompt", lambda e: e.stream("")),
]


@pytest.mark.parametrize(
    ("field", "values"),
    [*((field, {field: v}) for field, bad in BAD_PARAMS.items() for v in bad), *TOLD_PARAMS],
    ids=lambda part: str(part)[:60],
)
def test_bad_parameters(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**values)


@pytest.mark.parametrize(("field", "values"), BAD_CONFIGS, ids=str)
def test_bad_configuration(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=field):
        EngineConfig(**values)


def test_good_parameters_at_their_limits() -> None:
    params = SamplingParams(max_tokens=1, temperature=0, top_p=1, min_p=1, seed=-(2**63), stop="x")
    assert params.stop == ("x",) and params.is_greedy
    SamplingParams(top_p=1e-9, top_k=10**9, seed=2**63 - 1, stop=["a", "b"], stop_token_ids=[0])


def test_extreme_parameters_are_served(make_engine: EngineFactory) -> None:
    """A request that is accepted must not fail in a step: other requests could fail with it."""
    params = [
        SamplingParams(temperature=10**30, top_k=2**63 - 2, max_tokens=2),
        SamplingParams(temperature=1, top_p=1e-300, min_p=1e-300, max_tokens=2),
    ]
    outputs = make_engine().generate([[1], [2]], params)
    assert all(output.finished for output in outputs)


def test_as_many_log_probabilities_as_tokens(make_engine: EngineFactory) -> None:
    output = make_engine().generate([1], greedy(2, logprobs=259))[0].outputs[0]
    assert output.logprobs is not None
    assert [len(logprobs) for logprobs in output.logprobs] == [259, 259]


def test_parameters_do_not_change_behind_a_request() -> None:
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("b")
    assert params.stop == ("a",)


@pytest.mark.parametrize(
    ("message", "refused"), [case[1:] for case in BAD_REQUESTS], ids=[c[0] for c in BAD_REQUESTS]
)
def test_a_bad_request_is_refused_alone(
    make_engine: EngineFactory, message: str, refused: Refused
) -> None:
    """The message has the field and the limit. The answer of a running request is unchanged."""
    engine = make_engine(max_model_len=64, max_num_seqs=2)
    engine.add_request([5, 6, 7], greedy(12), "busy")
    early = [*engine.step(), *engine.step()]
    with pytest.raises(ValueError, match=message):
        refused(engine)
    engine.check_invariants()
    outputs = drain(engine)
    assert set(outputs) == {"busy"}, "I4: a refused request was served"
    assert_one_answer("tiny-llama", outputs["busy"][-1], 12)
    assert len(early) == 2


def test_more_positions_than_the_model_has(make_engine: EngineFactory) -> None:
    with pytest.raises(ValueError, match=r"max_model_len must be at most 512"):
        make_engine(max_model_len=513)


def test_the_longest_prompt_is_served(make_engine: EngineFactory) -> None:
    """One output token fits after the longest prompt. The prompt is not truncated."""
    engine = make_engine(max_model_len=64)
    output = engine.generate([list(range(63))], greedy(10))[0]
    assert len(output.prompt_token_ids) == 63
    assert len(output.outputs[0].token_ids) == 1
    assert_one_answer("tiny-llama", output, 1)


@pytest.mark.since("m2_continuous")
@pytest.mark.before("m3_paged")
def test_a_prompt_over_the_token_budget(make_engine: EngineFactory) -> None:
    """Such a prompt could never be computed in one step, and would block the queue for ever."""
    engine = make_engine(max_num_batched_tokens=16)
    with pytest.raises(ValueError, match="17.*max_num_batched_tokens=16"):
        engine.add_request([1] * 17)
    assert_one_answer("tiny-llama", engine.generate([[1] * 16], greedy(4))[0], 4)


@pytest.mark.parametrize("request_id", [None, 5, [], {}, b"a", object()])
def test_an_id_that_is_none_aborts_nothing(make_engine: EngineFactory, request_id: Any) -> None:
    engine = make_engine()
    engine.add_request([1, 2], greedy(3), "a")
    engine.step()
    assert not engine.abort_request(request_id)
    assert drain(engine)["a"][-1].outputs[0].finish_reason != "abort"
