"""The interface that every engine has: outputs, mixed calls, statistics."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from common import EngineConfig, LoadedModel, RequestOutput, SamplingParams
from milestones.chain import load
from tests.conftest import EngineFactory, ModuleOf, shared_model
from tests.helpers.oracle import assert_one_answer, drain, greedy

CHAT = [{"role": "user", "content": "Hi!"}]


def test_the_package_exports_its_engine(milestone: str) -> None:
    engine_class = load(milestone).LLMEngine
    with engine_class(EngineConfig(model="tiny-llama")) as engine:
        assert engine.config.max_model_len == 512, "max_model_len is not the model's limit"
        output = engine.generate("abc", greedy(3))[0]
    assert isinstance(output, RequestOutput)


def test_outputs_are_cumulative_and_end_once(make_engine: EngineFactory) -> None:
    engine = make_engine()
    name = engine.add_request("hello", greedy(5, ignore_eos=True, logprobs=1))
    history = drain(engine)[name]
    assert [o.finished for o in history] == [False] * 4 + [True]
    for i, output in enumerate(history):
        completion = output.outputs[0]
        assert output.request_id == name and output.prompt == "hello"
        assert output.prompt_token_ids == shared_model("tiny-llama").tokenizer.encode("hello")
        assert completion.token_ids == history[-1].outputs[0].token_ids[: i + 1]
        assert completion.logprobs is not None and len(completion.logprobs) == i + 1
        assert (completion.finish_reason is None) == (not output.finished)
    assert history[-1].outputs[0].finish_reason == "length"


def test_an_output_does_not_change_later(make_engine: EngineFactory) -> None:
    engine = make_engine()
    name = engine.add_request("hello", greedy(6, ignore_eos=True, logprobs=1))
    kept, copies = [], []
    while engine.has_unfinished_requests():
        for output in engine.step():
            kept.append(output)
            copies.append(copy.deepcopy(output))
    assert [output.request_id for output in kept] == [name] * 6
    assert kept == copies, "a later step changed an output that the user kept"
    assert [output.metrics.finished_time is None for output in kept] == [True] * 5 + [False]


def test_the_sampling_metadata_is_ready_before_the_forward(
    code_of: ModuleOf, make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling begins as soon as the logits are there: its parameters must not be built then."""
    engine, events = make_engine(), list[str]()
    runner = code_of("model_runner")
    made = runner.SamplingMetadata.from_requests

    def from_requests(*args: Any, **more: Any) -> Any:
        events.append("metadata")
        return made(*args, **more)

    monkeypatch.setattr(runner.SamplingMetadata, "from_requests", from_requests)
    hook = engine.loaded.model.register_forward_pre_hook(lambda *_: events.append("forward"))
    try:
        engine.generate("hello", greedy(1))
    finally:
        hook.remove()
    assert events == ["metadata", "forward"]


def test_metrics_are_in_order(make_engine: EngineFactory) -> None:
    metrics = make_engine().generate("abc", greedy(4))[0].metrics
    assert metrics.first_token_time is not None and metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
    assert metrics.time_to_first_token == metrics.first_token_time - metrics.arrival_time
    assert metrics.num_cached_tokens == 0


def test_prompts_of_every_kind(make_engine: EngineFactory) -> None:
    engine = make_engine()
    token_ids = engine.loaded.tokenizer.encode("abc")
    outputs = [
        *engine.generate("abc", greedy(6)),
        *engine.generate(token_ids, greedy(6)),
        *engine.generate(["abc", token_ids], greedy(6)),
    ]
    assert len(outputs) == 4
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert [o.prompt for o in outputs] == ["abc", None, "abc", None]
    assert engine.generate([], greedy(6)) == []


def test_default_parameters_sample(make_engine: EngineFactory) -> None:
    assert len(make_engine(seed=0).generate("abc")[0].outputs[0].token_ids) <= 16


def test_parameters_of_each_prompt(make_engine: EngineFactory) -> None:
    lengths = [3, 1, 5]
    outputs = make_engine().generate(
        ["a", "b", "c"], [greedy(n, ignore_eos=True) for n in lengths], progress=True
    )
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths


def test_chat_goes_through_the_template(make_engine: EngineFactory) -> None:
    engine = make_engine()
    (one,) = engine.chat(CHAT, greedy(4))
    many = engine.chat([CHAT, [*CHAT, {"role": "assistant", "content": "Yes?"}, *CHAT]], greedy(4))
    assert one.prompt == "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    assert one.outputs == many[0].outputs
    assert len(many[1].prompt_token_ids) > len(one.prompt_token_ids)
    assert one.prompt_token_ids.count(257) == 2, "special tokens were encoded as plain text"


def test_chat_needs_a_template(make_engine: EngineFactory) -> None:
    from common.hf.tiny import byte_tokenizer

    bare = byte_tokenizer()
    bare.chat_template = None
    engine = make_engine(LoadedModel("bare", shared_model("tiny-llama").model, bare))
    with pytest.raises(ValueError, match="chat template"):
        engine.chat(CHAT)


def test_calls_may_be_mixed(make_engine: EngineFactory) -> None:
    """`generate` and `stream` keep the outputs of other requests for the next call of `step`."""
    engine = make_engine(max_num_seqs=3)
    engine.add_request([1, 2, 3], greedy(2, ignore_eos=True), "short")
    engine.add_request([4, 5], greedy(40, ignore_eos=True), "long")
    stream = engine.stream([6, 7], greedy(6, ignore_eos=True))
    streamed = [next(stream)]
    generated = engine.generate([8, 9], greedy(9))
    assert_one_answer("tiny-llama", generated[0], 9)
    streamed += list(stream)
    assert streamed[-1].finished and len(streamed[-1].outputs[0].token_ids) == 6
    outputs = drain(engine)
    assert [o.finished for o in outputs["short"]][-1] and outputs["long"][-1].finished
    assert sum(o.finished for o in outputs["short"]) == 1, "not exactly one final output"


def test_two_streams_in_turns(make_engine: EngineFactory) -> None:
    engine = make_engine(max_num_seqs=2)
    streams = [engine.stream([i], greedy(8, ignore_eos=True)) for i in (1, 2)]
    ends: list[RequestOutput] = []
    while streams:
        for stream in list(streams):
            output = next(stream, None)
            if output is None:
                streams.remove(stream)
            elif output.finished:
                ends.append(output)
    assert len(ends) == 2
    for output in ends:
        assert len(output.outputs[0].token_ids) == 8


def test_statistics(make_engine: EngineFactory) -> None:
    engine = make_engine(max_num_seqs=2)
    for i in range(3):
        engine.add_request([i, 1, 2, 3], greedy(5, ignore_eos=True))
    assert engine.stats().num_waiting == 3
    engine.step()
    stats = engine.stats()
    assert stats.num_running >= 1 and stats.num_running + stats.num_waiting == 3
    assert stats.kv_tokens_used == 4 * stats.num_running
    assert stats.kv_tokens_reserved >= stats.kv_tokens_used
    drain(engine)
    stats = engine.stats()
    assert stats.prefill_tokens == 12
    assert stats.decode_tokens == 3 * 4, (
        "the prefill gives the first token, and the last token is never an input"
    )
    assert stats.cached_prompt_tokens == 0 and stats.num_retractions == 0


def test_request_ids(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.add_request([1], greedy(1), "request-0")
    names = {engine.add_request([1], greedy(1)) for _ in range(3)}
    assert len(names) == 3 and "request-0" not in names
    drain(engine)


def test_unicode_prompts(make_engine: EngineFactory) -> None:
    engine = make_engine()
    output = engine.generate("naïve 😀 日本", SamplingParams(max_tokens=2, seed=1))[0]
    assert output.prompt == "naïve 😀 日本"
    assert engine.loaded.tokenizer.decode(output.prompt_token_ids) == output.prompt
