"""`prompt_logprobs`: the log probabilities of a prompt, the same in every engine."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from common import EngineConfig, LoadedModel, SamplingParams
from common.hf.model_loading import load_model
from common.sampling import logprobs
from milestones.chain import load
from milestones.lab.instruments.hash_model import LOGIT, VOCAB_SIZE, HashChain, hash_model
from tests.conftest import EngineFactory, build_engine, plain_model, schedules, shared_model
from tests.helpers.oracle import cache_of_engine, completions, drain, greedy
from tests.helpers.random_schedule import random_prompt, random_sizes

PROMPT = [5, 9, 2, 7, 1, 4, 8, 3, 6, 11, 19, 12]
Table = list[dict[int, float] | None]


def scored(max_tokens: int = 1, top: int = 2, **values: Any) -> SamplingParams:
    return greedy(max_tokens, prompt_logprobs=top, ignore_eos=True, **values)


@torch.inference_mode()
def expected(model: str, prompt: list[int]) -> torch.Tensor:
    """Return Hugging Face's log probabilities after each token but the last, [T - 1, V]."""
    hugging_face, cache = plain_model(model).model, cache_of_engine()
    logits = hugging_face(input_ids=torch.tensor([prompt]), past_key_values=cache).logits
    found: torch.Tensor = logits[0, :-1].float().log_softmax(dim=-1)
    return found


def assert_right(found: Table | None, model: str, prompt: list[int], top: int) -> None:
    assert found is not None and len(found) == len(prompt) and found[0] is None
    for row, token, values in zip(expected(model, prompt), prompt[1:], found[1:], strict=True):
        assert values is not None and next(iter(values)) == token
        assert set(values) == {token, *row.topk(top).indices.tolist()}
        for token_id, value in values.items():
            assert value == pytest.approx(float(row[token_id]), abs=1e-4)


@pytest.mark.electives
@pytest.mark.parametrize("top", [0, 3])
def test_they_are_those_of_the_model(make_engine: EngineFactory, top: int) -> None:
    engine = make_engine()
    asked, other = engine.generate([PROMPT, PROMPT[:5]], [scored(3, top), greedy(3)])
    assert_right(asked.prompt_logprobs, "tiny-llama", PROMPT, top)
    assert other.prompt_logprobs is None
    alone = engine.generate([PROMPT], greedy(3, ignore_eos=True))[0]
    assert asked.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("model", ["tiny-granite", "tiny-gpt2", "tiny-opt"])
def test_what_a_model_does_after_its_head_is_done(make_engine: EngineFactory, model: str) -> None:
    """Granite divides its logits, and OPT projects its hidden states."""
    (output,) = make_engine(model).generate([PROMPT], scored())
    assert_right(output.prompt_logprobs, model, PROMPT, 2)


@pytest.mark.since("m3_paged")
@pytest.mark.electives
def test_chunks_change_no_bit(make_engine: EngineFactory) -> None:
    """I2: nor do other requests, the sizes of pages, and an end in the middle of a prompt."""
    engines = [
        make_engine(),
        make_engine(max_num_batched_tokens=3, page_size=2, num_pages=40),
        make_engine(max_num_batched_tokens=5, page_size=4, num_pages=8),
    ]
    tables = []
    for engine in engines:
        for number, length in enumerate((12, 5, 9)):
            engine.add_request(PROMPT[:length], scored(9), f"{number}")
            engine.step()
            if engine is engines[2]:
                engine.core.send_back()  # as a retraction does
        tables.append({name: got[-1].prompt_logprobs for name, got in drain(engine).items()})
    assert tables[1] == tables[0] and tables[2] == tables[0]


def test_no_step_holds_the_logits_of_a_whole_prompt(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    whole = engine.generate([PROMPT], scored())[0].prompt_logprobs
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 3 * 259)
    rows: list[int] = []
    model = engine.loaded.model
    hook = model.register_forward_hook(lambda _, args, out: rows.append(out.logits.shape[1]))
    try:
        parts = engine.generate([PROMPT], scored())[0].prompt_logprobs
    finally:
        hook.remove()
    assert parts == whole and rows == [1, 3, 3, 3, 2]


@pytest.mark.since("m4_radix")
@pytest.mark.electives
def test_a_prefix_cache_serves_none_of_it(make_engine: EngineFactory) -> None:
    """A cached page has no logits. What the request computes is cached for others."""
    engine = make_engine(page_size=4, num_pages=40)
    for params, cached in ((scored(), 0), (scored(), 0), (greedy(1), 8)):
        (output,) = engine.generate([PROMPT], params)
        assert output.metrics.num_cached_tokens == cached
    together = engine.generate([PROMPT] * 2, [greedy(2), scored(2)])
    assert_right(together[1].prompt_logprobs, "tiny-llama", PROMPT, 2)


def test_the_outputs_of_a_request_share_them(make_engine: EngineFactory) -> None:
    """With n > 1, the prompt is the same, so they are computed once."""
    engine = make_engine()
    name = engine.add_request(PROMPT, scored(2, n=3))
    requests = engine.queued_requests()
    assert [r.prompt_logprobs is None for r in requests] == [False, True, True]
    output = drain(engine)[name][-1]
    assert_right(output.prompt_logprobs, "tiny-llama", PROMPT, 2)


def test_the_shortest_prompt_has_none(make_engine: EngineFactory) -> None:
    (output,) = make_engine().generate([[7]], scored(2))
    assert output.prompt_logprobs == [None] and output.finished


@pytest.mark.since("m3_paged")
@pytest.mark.before("disaggregated")  # they arrive together with the pages
def test_an_aborted_request_has_those_of_its_chunks(make_engine: EngineFactory) -> None:
    engine = make_engine(max_num_batched_tokens=4)
    name = engine.add_request(PROMPT, scored())
    engine.step()
    engine.abort_request(name)
    (output,) = engine.step()
    assert output.prompt_logprobs is not None
    known = [values is not None for values in output.prompt_logprobs]
    assert known[0] is False and any(known) and not known[-1]


@pytest.mark.since("m1_single")
@pytest.mark.before("m2_continuous")
def test_without_a_cache_they_are_computed_once() -> None:
    loaded = shared_model("tiny-llama")
    engine = load("m1_single", "engine").LLMEngine(
        EngineConfig(model=loaded.name, device="cpu"), loaded, use_cache=False
    )
    (output,) = engine.generate([PROMPT], scored(3))
    assert_right(output.prompt_logprobs, "tiny-llama", PROMPT, 2)
    engine.close()


def test_a_model_without_layers_of_its_own_refuses_them(milestone: str) -> None:
    loaded = load_model(EngineConfig(model="tiny-llama", device="cpu"), plain=True)
    model: Any = loaded.model
    model.get_decoder = lambda: model
    engine = build_engine(milestone, loaded)
    with pytest.raises(ValueError, match="prompt_logprobs: tiny-llama does not divide"):
        engine.add_request(PROMPT, scored())
    assert engine.generate([PROMPT], greedy(2))[0].finished
    engine.close()


def of_chain(prompt: list[int]) -> list[float | None]:
    """Return the log probabilities that the hash model gives a prompt, in plain Python."""
    chain, total = HashChain([]), math.log(math.exp(LOGIT) + VOCAB_SIZE - 1)
    found: list[float | None] = []
    for token in prompt:
        is_likely = found and chain.next_token() == token
        found.append((LOGIT if is_likely else 0.0) - total if chain.num_tokens else None)
        chain.feed(token)
    return found


@pytest.mark.thorough("seconds on each engine", fast_on=("m5_overlap",))
@pytest.mark.since("m3_paged")
@pytest.mark.electives
def test_random_schedules(milestone: str) -> None:
    """Chunks, retractions, shared prefixes and aborts: each prompt has its own."""
    loaded: LoadedModel = hash_model()
    for seed in range(schedules(60)):
        chance = random.Random(seed)
        page_size, longest, num_pages = random_sizes(chance)
        engine = build_engine(
            milestone, loaded, page_size=page_size, num_pages=num_pages, max_model_len=128,
            max_num_batched_tokens=chance.choice([2, 5, 30]), max_num_seqs=chance.choice([1, 3, 8]),
        )  # fmt: skip
        prompts: dict[str, list[int]] = {}
        finals: dict[str, Any] = {}
        while len(prompts) < 8 or engine.has_unfinished_requests():
            while len(prompts) < 8 and chance.random() < 0.4:
                prompt = random_prompt(chance, longest)
                if chance.random() < 0.5:  # some of its tokens are likely ones
                    prompt = [*prompt[:2], *(HashChain(prompt[:2]).next_token() for _ in "a")]
                params = scored(chance.choice([1, 4, 9]), chance.choice([0, 2]))
                prompts[engine.add_request(prompt, params)] = prompt
            finals |= {output.request_id: output for output in engine.step() if output.finished}
        for name, prompt in prompts.items():
            found = finals[name].prompt_logprobs
            got = [None if row is None else row[t] for row, t in zip(found, prompt, strict=True)]
            assert got == pytest.approx(of_chain(prompt), abs=1e-5), f"I2: seed {seed}, {name}"
        engine.close()


@pytest.mark.since("m3_paged")
def test_a_failed_step_delivers_none(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is tried again, and the request gets each of them once."""
    engine: Any = make_engine(max_num_batched_tokens=4)
    engine.add_request(PROMPT, scored(2), "a")
    engine.step()
    runner = engine.core.runner
    forward, failures = runner.forward, iter([True])

    def failing(inputs: Any) -> Any:
        if next(failures, False):
            raise RuntimeError("planted")
        return forward(inputs)

    monkeypatch.setattr(runner, "forward", failing)
    outputs = drain(engine)
    assert_right(outputs["a"][-1].prompt_logprobs, "tiny-llama", PROMPT, 2)
    assert not completions(engine)
