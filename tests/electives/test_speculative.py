"""speculative: drafts change the number of steps and no token, and leave no memory behind."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common import EngineConfig, LoadedModel, SamplingParams, load_model
from common.sampling.draws import uniform
from milestones.lab.instruments.streams import LateStream
from tests.conftest import EngineFactory, ModuleOf, build_engine, schedules, shared_model
from tests.exercises.by_hand import make_request, watch
from tests.helpers.fake_overlap import hash_engine
from tests.helpers.fake_paged import expected_tokens
from tests.helpers.oracle import assert_one_answer, drain, greedy
from tests.helpers.random_schedule import add_random, random_prompt, random_sizes, run_schedule

pytestmark = [pytest.mark.since("speculative"), pytest.mark.streams]

PROMPT = [5, 6, 7]


Propose = Callable[[Any, int], list[int]]


def sometimes_wrong(chance: random.Random, wrong: float) -> Propose:
    """Return a drafter that knows the hash model's answers, and says some of them wrong."""

    def propose(request: Any, count: int) -> list[int]:
        assert min(request.token_ids) >= 0, "a drafter never sees a placeholder"
        right = expected_tokens(request.token_ids, chance.randint(0, count))
        return [t if chance.random() >= wrong else (t + 1) % 50 for t in right]

    return propose


def given(output: list[int]) -> Propose:
    """Return a drafter that proposes what the test gives it: the output, by position."""
    return lambda request, count: output[request.num_output_tokens :][:count]


def with_drafter(engine: Any, propose: Propose) -> Any:
    engine.core.scheduler.drafting.drafter = SimpleNamespace(propose=propose)
    return engine


def outputs_of(engine: Any, prompts: list[list[int]], params: Any) -> list[Any]:
    return [o.outputs[0] for o in engine.generate(prompts, params, progress=False)]


def plain_answer(params: Any, prompt: list[int] = PROMPT, **config: Any) -> Any:
    """Return what m5 answers to a request that runs alone."""
    with build_engine("m5_overlap", **config) as plain:
        [found] = outputs_of(plain, [prompt], params)
    return found


def fuzz(module: Any, seed: int) -> Any:
    """Run one random schedule: arrivals, stops, aborts, retractions, right and wrong drafts."""
    chance = random.Random(seed)
    page_size, longest, num_pages = random_sizes(chance, (1, 2, 3, 4, 16), (6, 20))
    engine = hash_engine(
        module, LateStream(), num_pages, page_size=page_size, max_num_seqs=chance.randint(1, 10),
        max_num_batched_tokens=chance.choice([1, 2, 5, 16, 64]),
    )  # fmt: skip
    with_drafter(engine, sometimes_wrong(chance, chance.choice([0.0, 0.1, 0.5, 1.0])))

    def add() -> tuple[str, list[int]]:
        return add_random(engine, chance, random_prompt(chance, longest, [[]]))

    def check() -> None:
        stats = engine.stats()
        assert 0 <= stats.num_accepted_tokens <= stats.num_draft_tokens

    run_schedule(engine, chance, add, chance.randint(1, 12), before_step=check)
    return engine


def test_random_schedules_with_right_and_wrong_drafts(module_of: ModuleOf) -> None:
    """Each step is audited: pages that refused drafts were written to are free again (I3)."""
    stats = [fuzz(module_of("engine"), seed).stats() for seed in range(schedules(1000))]
    assert sum(s.num_accepted_tokens for s in stats) > len(stats)
    assert sum(s.num_draft_tokens - s.num_accepted_tokens for s in stats) > len(stats)
    assert sum(s.num_retractions for s in stats) > len(stats) // 200


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_drafts_change_no_token(make_engine: EngineFactory, temperature: float) -> None:
    """Right, wrong and no drafts; greedy and sampled; the tokens and log probabilities of m5."""
    prompts = [PROMPT, [9] * 20, [1, 2] * 6]
    params = [
        SamplingParams(max_tokens=24, temperature=temperature, seed=i, ignore_eos=True, logprobs=1)
        for i in range(3)
    ]
    with build_engine("m5_overlap") as plain:
        expected = outputs_of(plain, prompts, params)
    right = expected[0].token_ids
    wrong = [(token + 1) % 250 for token in right]
    half = [w if i % 3 == 2 else t for i, (t, w) in enumerate(zip(right, wrong, strict=True))]
    for output in (right, wrong, half, []):
        engine = with_drafter(make_engine(), given(output))
        found = outputs_of(engine, prompts, params)
        assert [o.token_ids for o in found] == [o.token_ids for o in expected]
        for ours, theirs in zip(found, expected, strict=True):
            assert [[*x] for x in ours.logprobs or []] == [[*x] for x in theirs.logprobs or []]
    assert engine.stats().num_draft_tokens == 0


def test_penalties_count_no_draft(make_engine: EngineFactory) -> None:
    """A request with penalties gets the tokens of m5, beside one that verifies drafts."""
    params = [greedy(20, ignore_eos=True, repetition_penalty=1.5), greedy(20, ignore_eos=True)]
    with build_engine("m5_overlap") as plain:
        expected = [o.token_ids for o in outputs_of(plain, [PROMPT, PROMPT], params)]
    engine = with_drafter(make_engine(), given(expected[1]))
    assert [o.token_ids for o in outputs_of(engine, [PROMPT, PROMPT], params)] == expected
    assert engine.stats().num_accepted_tokens > 0


def test_right_drafts_save_steps(make_engine: EngineFactory) -> None:
    expected = plain_answer(greedy(21, ignore_eos=True))
    engine = with_drafter(make_engine(), given(expected.token_ids))
    [output] = outputs_of(engine, [PROMPT], greedy(21, ignore_eos=True))
    stats = engine.stats()
    assert output.token_ids == expected.token_ids
    assert stats.num_steps == 1 + 4, "the prompt, and four steps of five tokens"
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (16, 16)
    assert stats.decode_tokens == 20 and stats.padding_tokens == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 8])
def test_max_tokens_counts_tokens(make_engine: EngineFactory, max_tokens: int) -> None:
    expected = plain_answer(greedy(20, ignore_eos=True))
    engine = with_drafter(make_engine(), given(expected.token_ids))
    [output] = outputs_of(engine, [PROMPT], greedy(max_tokens, ignore_eos=True))
    assert output.token_ids == expected.token_ids[:max_tokens]
    assert output.finish_reason == "length"
    assert engine.stats().num_draft_tokens <= max(0, max_tokens - 2)


def test_a_stop_at_every_place_of_a_run(make_engine: EngineFactory) -> None:
    expected = plain_answer(greedy(16, ignore_eos=True))
    tokens = expected.token_ids
    for stop in tokens:
        engine = with_drafter(make_engine(), given(tokens))
        params = greedy(16, stop_token_ids=[stop], ignore_eos=True, logprobs=0)
        [output] = outputs_of(engine, [PROMPT], params)
        assert output.token_ids == tokens[: tokens.index(stop) + 1]
        assert output.finish_reason == "stop"
        assert len(output.logprobs or []) == len(output.token_ids)


def test_refused_drafts_are_not_in_the_tree(make_engine: EngineFactory) -> None:
    """A prompt that spells refused drafts finds no page beyond the tokens that were accepted."""
    expected = plain_answer(greedy(9, ignore_eos=True))
    wrong = [(token + 1) % 250 for token in expected.token_ids]
    engine: Any = with_drafter(make_engine(page_size=1), given(wrong))
    outputs_of(engine, [PROMPT], greedy(9, ignore_eos=True))
    assert engine.stats().num_draft_tokens > 0 == engine.stats().num_accepted_tokens
    spelled = [*PROMPT, expected.token_ids[0], *wrong[1:], 3]
    [output] = engine.generate([spelled], greedy(6, ignore_eos=True), progress=False)
    assert output.metrics.num_cached_tokens == len(PROMPT) + 1
    assert_one_answer("tiny-llama", output, 6)


def test_drafts_take_only_the_rest_of_the_budget(make_engine: EngineFactory) -> None:
    engine: Any = with_drafter(make_engine(max_num_batched_tokens=9), given([7] * 60))
    for i in range(3):
        engine.add_request([i + 1, 2], greedy(30, ignore_eos=True))
    engine.add_request([4] * 40, greedy(3, ignore_eos=True))
    sizes: list[int] = []

    def check(batch: Any, _table: Any) -> None:
        sizes.append(batch.num_tokens)
        unfinished = [r for r in batch.requests if r.num_output_tokens == 0]
        assert not any(request in batch.drafts for request in unfinished)

    watch(engine.core.runner, "launch", check)
    drain(engine)
    assert max(sizes) == 9


def test_many_requests_overlap_and_do_not_draft(make_engine: EngineFactory) -> None:
    engine: Any = make_engine(max_num_seqs=16, enable_overlap=True)
    prompts = [[i, 1, i, 1, i, 1, i] for i in range(12)]
    for prompt in prompts:
        engine.add_request(prompt, greedy(12, ignore_eos=True))
    engine.step()
    assert engine.core.result_queue, "the next step was launched before this one was processed"
    drain(engine)
    assert engine.stats().num_draft_tokens == 0


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2]),  # of equal sizes, the latest
        ([5, 1, 2, 3, 4, 7, 2, 3, 8, 1, 2, 3], [4, 7, 2, 3]),  # the longest
        ([4, 4, 4], [4]),  # it may overlap itself
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_prompt_lookup(module_of: ModuleOf, tokens: list[int], drafts: list[int]) -> None:
    drafter = module_of("drafter").NGramDrafter()
    assert drafter.propose(make_request("a", tokens), 4) == drafts


def test_suffix_decoding_learns_from_earlier_requests(module_of: ModuleOf) -> None:
    """The most frequent follower counts, and of equal ones the newest. Doubt ends the drafts."""
    drafter = module_of("suffix_drafter").SuffixDrafter(depth=3)
    assert drafter.propose(make_request("a", [1, 2, 3, 4]), 4) == []
    assert drafter.propose(make_request("b", [9, 1, 2]), 4) == [3, 4], "what followed in a"
    assert drafter.propose(make_request("c", [1, 2, 5]), 4) == []
    assert drafter.propose(make_request("d", [8, 1, 2]), 1) == [5], "3 and 5 once each: the newest"
    request = make_request("e", [1, 2])
    assert drafter.propose(request, 1) == [5] and drafter.propose(request, 1) == [5], "counted once"
    sure = module_of("suffix_drafter").SuffixDrafter(depth=3, min_share=0.6)
    for text in ([1, 2, 3], [1, 2, 5], [7, 1]):
        sure.learn(make_request("x", text))
    assert sure.propose(make_request("y", [7, 1]), 4) == [2], "3 and 5 are too uncertain"


def test_suffix_decoding_forgets_the_oldest(module_of: ModuleOf) -> None:
    drafter = module_of("suffix_drafter").SuffixDrafter(depth=2, most_contexts=10)
    for i in range(50):
        drafter.learn(make_request("x", [3 * i, 3 * i + 1, 3 * i + 2]))
    assert len(drafter.followers) == 10
    assert drafter.propose(make_request("y", [147]), 4) == [148, 149]
    assert drafter.propose(make_request("y", [0]), 4) == []


def test_a_request_that_was_answered_before_is_drafted(
    make_engine: EngineFactory, module_of: ModuleOf
) -> None:
    engine = with_drafter(make_engine(), module_of("suffix_drafter").SuffixDrafter().propose)
    for _ in range(2):
        before = engine.stats()
        [output] = engine.generate([PROMPT], greedy(20, ignore_eos=True), progress=False)
        assert_one_answer("tiny-llama", output, 20)
    after = engine.stats()
    assert after.num_accepted_tokens - before.num_accepted_tokens >= 14
    assert after.num_steps - before.num_steps <= 7


def test_a_model_that_drafts_for_itself_is_always_right(
    make_engine: EngineFactory, module_of: ModuleOf
) -> None:
    loaded = shared_model("tiny-llama")
    drafter = module_of("draft_model").DraftModel(loaded, loaded)
    engine = with_drafter(make_engine(), drafter.propose)
    outputs = engine.generate([PROMPT, [8] * 9], greedy(20, ignore_eos=True), progress=False)
    for output in outputs:
        assert_one_answer("tiny-llama", output, 20)
    assert engine.stats().num_accepted_tokens == engine.stats().num_draft_tokens > 20


def test_a_draft_model_with_other_tokens_is_refused(module_of: ModuleOf) -> None:
    target = shared_model("tiny-llama")

    other: Any = SimpleNamespace(name="other", vocab_size=target.vocab_size + 1)
    with pytest.raises(ValueError, match="vocabulary"):
        module_of("draft_model").DraftModel(other, target)
    names = {**target.tokenizer.get_vocab(), "one more": 3}
    tokenizer = SimpleNamespace(get_vocab=lambda: names)
    same: Any = SimpleNamespace(name="same", vocab_size=target.vocab_size, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="different tokens"):
        module_of("draft_model").DraftModel(same, target)


@pytest.mark.parametrize("name", ["tiny-gemma3_text", "tiny-qwen3_next"])
def test_a_draft_model_with_a_cache_that_cannot_be_cropped_is_refused(
    module_of: ModuleOf, name: str
) -> None:
    """Refused drafts leave its cache again: a window or a state has forgotten what was before."""
    with pytest.raises(ValueError, match=f"{name} has sliding windows or"):
        module_of("draft_model").DraftModel(shared_model(name), shared_model("tiny-llama"))


def separate_model(name: str) -> LoadedModel:
    """Return a model that no other test uses, so that it may be changed."""
    return load_model(EngineConfig(model=name, device="cpu"), plain=True)


@pytest.mark.parametrize(("num_positions", "num_drafts"), [(2, 0), (9, 4 + 1), (16, 4 + 4 + 3)])
def test_drafts_end_at_the_positions_of_the_draft_model(
    make_engine: EngineFactory, module_of: ModuleOf, num_positions: int, num_drafts: int,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """GPT-2 has a vector for each position, and raises where it has none."""
    draft: Any = separate_model("tiny-gpt2")
    draft.model.config.max_position_embeddings = num_positions
    draft.model.transformer.wpe.weight.data = draft.model.transformer.wpe.weight[:num_positions]
    drafter = module_of("draft_model").DraftModel(draft, shared_model("tiny-gpt2"))
    engine = with_drafter(make_engine("tiny-gpt2"), drafter.propose)
    [output] = engine.generate([PROMPT], greedy(24, ignore_eos=True), progress=False)
    assert_one_answer("tiny-gpt2", output, 24)
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens == num_drafts
    assert not caplog.records


def failing(output: list[int], error: type[Exception], calls: Iterator[int]) -> Propose:
    """Return a drafter that raises an error at each third of its calls."""

    def propose(request: Any, count: int) -> list[int]:
        if next(calls) % 3 == 2:
            raise error("no guess")
        return given(output)(request, count)

    return propose


def test_a_drafter_that_fails_costs_steps_and_no_token(
    make_engine: EngineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    prompts, params = [PROMPT, [9] * 20], greedy(24, ignore_eos=True)
    with build_engine("m5_overlap") as plain:
        expected = [o.token_ids for o in outputs_of(plain, prompts, params)]
    calls = itertools.count(1)
    engine = with_drafter(make_engine(), failing(expected[0], RuntimeError, calls))
    assert [o.token_ids for o in outputs_of(engine, prompts, params)] == expected
    assert engine.stats().num_accepted_tokens > 0 and next(calls) > 7
    [record] = caplog.records
    assert "drafter failed" in record.message and record.exc_info, "it is logged once"


@pytest.mark.parametrize("error", [NotImplementedError, AssertionError])
def test_the_errors_of_an_unfinished_drafter_are_seen(
    milestone: str, error: type[Exception]
) -> None:
    engine = with_drafter(build_engine(milestone), failing([], error, itertools.count(1)))
    engine.add_request(PROMPT, greedy(9, ignore_eos=True))
    with pytest.raises(error, match="no guess"):
        for _ in range(9):
            engine.step()
    engine.close()


def test_a_draft_model_that_failed_starts_anew(
    make_engine: EngineFactory, module_of: ModuleOf
) -> None:
    """When its last layer fails, the others have more in the cache. That cache is not used."""
    draft: Any = separate_model("tiny-llama")
    drafter = module_of("draft_model").DraftModel(draft, shared_model("tiny-llama"))
    engine, calls = with_drafter(make_engine(), drafter.propose), iter(range(1000))

    def fail(*_: Any) -> None:
        if next(calls) == 6:
            raise RuntimeError("the last layer")

    draft.model.model.layers[-1].register_forward_pre_hook(fail)
    [output] = engine.generate([PROMPT], greedy(30, ignore_eos=True), progress=False)
    assert_one_answer("tiny-llama", output, 30)
    stats = engine.stats()
    assert next(calls) > 12 and stats.num_accepted_tokens == stats.num_draft_tokens > 15


def test_rejection_sampling_has_the_distribution_of_the_model(module_of: ModuleOf) -> None:
    """Four tokens, 20,000 seeds: the first two tokens are as likely as without drafts."""
    verify, seeds = module_of("rejection").verify, 20_000
    target = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]]).double()
    draft = torch.tensor([[0.2, 0.2, 0.2, 0.4]]).double()
    cases = np.arange(seeds).repeat(5), np.tile(np.arange(5), seeds)
    numbers = torch.from_numpy(uniform(*cases)).view(seeds, 5)
    guesses = torch.searchsorted(draft[0].cumsum(0), numbers[:, 4].contiguous(), right=True)
    firsts, pairs = Counter[int](), Counter[tuple[int, int]]()
    for guess, row in zip(guesses.tolist(), numbers, strict=True):
        tokens = verify(target, draft, [guess], row[:4].view(2, 2))
        firsts[tokens[0]] += 1
        if len(tokens) == 2:
            pairs[tokens[0], tokens[1]] += 1
    for token, share in enumerate(target[0].tolist()):
        assert abs(firsts[token] / seeds - share) < 4 * (share * (1 - share) / seeds) ** 0.5 + 1e-9
    accepted = sum(pairs.values())
    assert abs(accepted / seeds - 0.6) < 0.015, "the sum of min(p, q)"
    for token, share in enumerate(target[1].tolist()):
        found = sum(n for (_, second), n in pairs.items() if second == token) / accepted
        assert abs(found - share) < 4 * (share * (1 - share) / accepted) ** 0.5


@pytest.mark.parametrize("distance", range(1, 7))
def test_drafts_end_before_max_model_len(make_engine: EngineFactory, distance: int) -> None:
    """No draft has a position that the model does not have, and the output ends where m5's does."""
    length = 32
    prompt = [i % 40 for i in range(length - distance)]
    expected = plain_answer(greedy(20, ignore_eos=True), prompt, max_model_len=length)
    assert len(expected.token_ids) == distance and expected.finish_reason == "length"
    engine: Any = with_drafter(
        make_engine(max_model_len=length), given(expected.token_ids + [7] * 9)
    )
    prepare, positions = engine.core.runner.inputs.prepare, list[int]()

    def watched(batch: Any, descriptor: Any = None) -> Any:
        inputs = prepare(batch, descriptor)
        positions.append(int(inputs.position_ids.max()))
        return inputs

    engine.core.runner.inputs.prepare = watched
    [output] = outputs_of(engine, [prompt], greedy(20, ignore_eos=True))
    assert output == expected and max(positions) < length
    assert engine.stats().num_draft_tokens == max(0, distance - 2)


def test_a_stop_string_at_every_place_of_a_run(make_engine: EngineFactory) -> None:
    """Text, tokens and log probabilities end where they end in m5, whole and as a stream."""
    with build_engine("m5_overlap") as plain:
        [whole] = outputs_of(plain, [PROMPT], greedy(16, ignore_eos=True))
        text, num_accepted = whole.text, 0
        for start in range(len(text) - 1):
            params = greedy(16, ignore_eos=True, stop=text[start : start + 2], logprobs=0)
            [expected] = outputs_of(plain, [PROMPT], params)
            engine = with_drafter(make_engine(), given(whole.token_ids))
            outputs = [output.outputs[0] for output in engine.stream(PROMPT, params)]
            final = outputs[-1]
            assert (final.text, final.token_ids) == (expected.text, expected.token_ids)
            assert final.finish_reason == expected.finish_reason == "stop"
            assert len(final.logprobs or []) == len(final.token_ids)
            assert all(final.text.startswith(output.text) for output in outputs)
            num_accepted += engine.stats().num_accepted_tokens
    assert num_accepted > 0


def test_a_ragged_batch_gives_each_request_its_own_answer(make_engine: EngineFactory) -> None:
    """Four and two drafts, a prompt in chunks and a request without a draft; seeds of their own."""
    prompts = [PROMPT, [3] * 40, [1, 2], [9] * 5]
    params = [
        SamplingParams(max_tokens=20, temperature=temperature, seed=i, ignore_eos=True, logprobs=1)
        for i, temperature in enumerate([0.0, 0.7, 1.3, 0.0])
    ]
    expected = [plain_answer(own, prompt) for prompt, own in zip(prompts, params, strict=True)]
    answers = {
        p[0]: (o.token_ids, n) for p, o, n in zip(prompts, expected, (4, 3, 0, 2), strict=True)
    }

    def propose(request: Any, count: int) -> list[int]:
        output, most = answers[request.token_ids[0]]
        return given(output)(request, min(count, most))

    engine: Any = with_drafter(make_engine(max_num_batched_tokens=16), propose)
    shapes: set[tuple[int, ...]] = set()
    watch(
        engine.core.runner, "launch", lambda batch, _: shapes.add(tuple(batch.num_scheduled_tokens))
    )
    found = outputs_of(engine, prompts, params)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert one == pytest.approx(other, abs=1e-4), "the row of another position"
    assert any(len(set(shape)) > 2 for shape in shapes), "no step was ragged"


def test_tokens_behind_the_end_of_a_run_are_not_counted(make_engine: EngineFactory) -> None:
    """Four drafts and a stop at the second token: one draft is accepted, and two tokens count."""
    expected = plain_answer(greedy(8, ignore_eos=True))
    tokens = expected.token_ids
    assert tokens.index(tokens[2]) == 2
    engine = with_drafter(make_engine(), given(tokens))
    params = greedy(8, ignore_eos=True, stop_token_ids=[tokens[2]])
    [output] = outputs_of(engine, [PROMPT], params)
    stats = engine.stats()
    assert output.token_ids == tokens[:3]
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 1)
    assert (stats.decode_tokens, stats.padding_tokens) == (2, 3)


def test_min_tokens_counts_tokens(make_engine: EngineFactory) -> None:
    """A stop token within a run, before and after `min_tokens`: the answer is that of m5."""
    tokens = plain_answer(greedy(12, ignore_eos=True)).token_ids
    for place in range(1, 8):
        params = greedy(12, ignore_eos=True, stop_token_ids=[tokens[place]], min_tokens=4)
        engine = with_drafter(make_engine(), given(tokens))
        assert outputs_of(engine, [PROMPT], params) == [plain_answer(params)]
