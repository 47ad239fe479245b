"""embedding: vectors beside text in the same batch, and random schedules with both."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from common import (
    EngineConfig,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    RequestOutput,
    SamplingParams,
    load_model,
)
from common.hf.tiny import ARCHITECTURES
from common.tracing.forced_retractions import force_retractions
from milestones.chain import ROOT, course_place, load
from milestones.electives.embedding.pooling_request import PoolingRequest
from milestones.lab.instruments.audit import assert_idle
from milestones.lab.instruments.fake_cuda import FakeCuda
from milestones.lab.instruments.streams import EarlyStream, LateStream
from tests.conftest import EngineFactory, ModuleOf, build_engine, plain_model, schedules
from tests.exercises.by_hand import scheduled, watch
from tests.helpers.fake_overlap import (
    HashResult,
    HashRunner,
    expected_states,
    hash_engine,
)
from tests.helpers.oracle import drain, greedy
from tests.helpers.random_schedule import add_random, random_prompt, random_sizes, run_schedule
from tests.helpers.replaced import plant, put_on_gpu

pytestmark = [pytest.mark.since("embedding"), pytest.mark.streams]

SCHEDULES = schedules(150)  # on each stream, and without overlap
KINDS: tuple[Any, ...] = ("LAST", "MEAN")
LENGTHS = (1, 15, 16, 17, 100)


def raw(kind: Any, **more: Any) -> PoolingParams:
    return PoolingParams(kind, **{"normalize": False, **more})


def vector_of(states: torch.Tensor, kind: str) -> torch.Tensor:
    return states[-1] if kind == "LAST" else states.sum(dim=0) / len(states)


def expected_vector(model: str, prompt: Sequence[int], kind: str) -> torch.Tensor:
    """Return the vector from the hidden states of Hugging Face's own model, [H]."""
    with torch.inference_mode():
        out = plain_model(model).model(torch.tensor([prompt]), output_hidden_states=True)
    return vector_of(out.hidden_states[-1][0], kind)


def pooled(output: RequestOutput) -> PoolingOutput:
    """Return what a pooling request has instead of a text."""
    assert isinstance(output, PoolingRequestOutput)
    return output.outputs


def error_of(output: RequestOutput, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    data = pooled(output).data
    assert data is not None and data.dtype == torch.float32
    return float((data - expected).abs().max() / expected.abs().max())


class FailingRunner(HashRunner):
    """A runner with forwards that fail now and then, before or after they are computed."""

    chance = random.Random(0)
    probability = 0.0
    healthy = 0
    failures = 0

    def is_searching(self) -> bool:
        return False

    def _compute(self, parts: list[Any], result: HashResult) -> None:
        self.healthy += 1
        fails = self.healthy > 4 and self.chance.random() < self.probability
        fails &= not self.is_searching()  # a request that fails twice while it gets no token ends
        if not fails or self.chance.random() < 0.5:
            super()._compute(parts, result)
        if fails:
            self.healthy = 0
            self.failures += 1
            raise RuntimeError("a forward failed")


def retract_vectors(scheduler: Any, every: int | None) -> None:
    """Every `every` steps, retract a pooling request between two chunks, each at most twice.

    `force_retractions` takes only requests that have new output tokens.
    """
    if every is None:
        return
    schedule, needs_result = scheduler.schedule, scheduler.needs_result
    steps, times = 0, Counter[Any]()

    def schedule_after_retraction() -> Any:
        nonlocal steps
        steps += 1
        if steps % every == 0:
            for request in scheduler.running[::-1]:
                if isinstance(request, PoolingRequest) and times[request] < 2:
                    times[request] += 1
                    scheduler.retract(request)
                    break
        return schedule()

    scheduler.schedule = schedule_after_retraction
    scheduler.needs_result = lambda: (steps + 1) % every == 0 or needs_result()


def fuzz(module: Any, seed: int, stream: type[LateStream], **config: Any) -> Any:
    """Run one random schedule of texts and vectors on few pages; audit each step."""
    chance = random.Random(seed)
    page_size, longest, num_pages = random_sizes(chance)
    engine = hash_engine(
        module, stream(), num_pages, FailingRunner, page_size=page_size,
        max_num_seqs=chance.randint(1, 6), max_num_batched_tokens=chance.choice([1, 2, 5, 16, 64]),
        schedule_policy=chance.choice(["fcfs", "fcfs", "lpm", "dfs-weight", "lof"]), **config,
    )  # fmt: skip
    engine.core.runner.chance, engine.core.runner.probability = chance, chance.choice([0, 0, 0.1])
    force_retractions(engine.core.scheduler, chance.choice([None, None, 2, 7]))
    engine.core.runner.is_searching = lambda: engine.search.is_active
    retract_vectors(engine.core.scheduler, chance.choice([None, 2, 3, 5]))

    def add() -> tuple[str, Any]:
        prompt = random_prompt(chance, longest)
        if chance.random() < 0.7:
            kind = chance.choice(KINDS)
            return engine.add_request(prompt, raw(kind)), vector_of(expected_states(prompt), kind)
        return add_random(engine, chance, prompt)

    run_schedule(engine, chance, add, chance.randint(4, 12), aborts=0.06)
    return engine


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stream", [LateStream, EarlyStream])
def test_random_schedules_of_texts_and_vectors(
    module_of: ModuleOf, stream: type[LateStream], overlap: bool
) -> None:
    """Schedules are exact: tokens and vectors, also after failures and retractions."""
    module = module_of("engine")
    engines = [fuzz(module, i, stream, enable_overlap=overlap) for i in range(SCHEDULES)]
    assert sum(e.stats().num_retractions for e in engines) > len(engines) // 3
    assert sum(e.stats().cached_prompt_tokens for e in engines) > len(engines) // 2
    assert sum(e.core.runner.failures for e in engines) > len(engines) // 3, "no forward failed"


def chunks_are_left_out(add: Any, self: Any, request: Any, num_tokens: int) -> None:
    add(self, request, num_tokens)
    if request.num_computed_tokens + num_tokens < request.num_tokens:
        self.pooled_indices = [i for i in self.pooled_indices if self.requests[i] != request]


def sums_never_restart(sum_up: Any, request: Any, row: torch.Tensor, start: int) -> None:
    sum_up(request, row, start + (request.partial_sum is not None))


def only_the_last_chunk(sum_up: Any, request: Any, row: torch.Tensor, start: int) -> None:
    sum_up(request, row, 0)


def in_the_order_of_arrival(_: Any, self: Any) -> list[Any]:
    found = [r for i in self.pooled_indices if (r := self.requests[i])]
    return sorted(found, key=lambda request: request.request_id)


def a_cached_prefix(_: Any, self: Any, request: Any) -> Any:
    return super(type(self), self)._cacheable_tokens(request)


@pytest.mark.parametrize(
    ("place", "mistake"),
    [
        ("schedule_batch.ScheduleBatch.add", chunks_are_left_out),
        ("engine.accumulate", sums_never_restart),
        ("engine.accumulate", only_the_last_chunk),
        ("schedule_batch.ScheduleBatch.pooled_requests", in_the_order_of_arrival),
        ("kv_cache.KVCacheManager._cacheable_tokens", a_cached_prefix),
    ],
)
def test_planted_mistakes_are_caught(
    module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch, place: str, mistake: Any
) -> None:
    """The schedules can fail: they find each of these mistakes within 100."""
    plant(monkeypatch, f"milestones.electives.embedding.{place}", mistake)
    with pytest.raises((AssertionError, ValueError, IndexError, TypeError)):
        for seed in range(100):
            fuzz(module_of("engine"), seed, LateStream)


@pytest.mark.parametrize(
    ("architecture", "passes"),
    [*((name, "all") for name in ARCHITECTURES), ("llama", "none"), ("gpt2", "none")],
)
def test_vectors_are_those_of_the_hidden_states_of_the_model(
    make_engine: EngineFactory, architecture: str, passes: str
) -> None:
    """I1: to 1e-5, in chunks of 16 tokens, beside a request for text."""
    model = f"tiny-{architecture}"
    config = EngineConfig(model=model, device="cpu", model_passes=passes)
    loaded = model if passes == "all" else load_model(config)
    engine: Any = make_engine(loaded, page_size=4, num_pages=60, max_num_batched_tokens=16)
    prompts = [[*range(3, 3 + n)] for n in (1, 17, 60)]
    engine.add_request([7, 8, 9], greedy(20, ignore_eos=True), "text")
    for kind in KINDS:
        outputs = engine.embed(prompts, raw(kind), progress=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert error_of(output, expected_vector(model, prompt, kind)) < 1e-5
    drain(engine)


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_chunks_do_not_change_a_vector(make_engine: EngineFactory, chunk: int) -> None:
    """One result for each request, in prompt order. MEAN adds the chunks up."""
    engine: Any = make_engine(max_num_batched_tokens=chunk, page_size=4, num_pages=100)
    both = [
        ([5 + n % 7, *range(20, 19 + n)], kind)
        for n in (LENGTHS[:4] if chunk == 1 else LENGTHS)
        for kind in KINDS
    ]
    prompts = [prompt for prompt, _ in both]
    outputs = engine.embed(prompts, [raw(kind) for _, kind in both], progress=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    for (prompt, kind), output in zip(both, outputs, strict=True):
        assert output.finished and output.outputs.finish_reason == "stop"
        assert error_of(output, expected_vector("tiny-llama", prompt, kind)) < 1e-5
    assert engine.stats().decode_tokens == 0, "nothing is decoded"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_a_mixed_batch_equals_solo_runs(make_engine: EngineFactory, order: Sequence[int]) -> None:
    """I2: vectors and sampled texts beside each other, with drawn seeds: none moves the others."""
    prompts = [[9, 8, 7, 6], [5, *range(30, 49)], [4, 4], [3, *range(60, 99)]]
    texts = SamplingParams(max_tokens=6, temperature=0.9, ignore_eos=True)
    params: list[Any] = [texts, raw("LAST"), texts, raw("MEAN")]
    with build_engine("m5_overlap", seed=11, num_pages=60) as m5:
        ids = [m5.add_request(prompts[i], params[i]) for i in order if i in (0, 2)]
        alone = drain(m5)
        drawn = dict(zip([i for i in order if i in (0, 2)], ids, strict=True))
        expected = {i: alone[name][-1].outputs[0].token_ids for i, name in drawn.items()}
    engine: Any = make_engine(seed=11, max_num_batched_tokens=8, page_size=4, num_pages=60)
    names = {engine.add_request(prompts[i], params[i]): i for i in order}
    for name, outputs in drain(engine).items():
        i, found = names[name], outputs[-1]
        if i in expected:
            assert found.outputs[0].token_ids == expected[i], "I2: a draw has moved"
        else:
            kind = params[i].pooling_type
            assert error_of(found, expected_vector("tiny-llama", prompts[i], kind)) < 1e-5
            assert len(outputs) == 1, "a pooling request has one output"


def test_a_model_that_does_not_show_its_states_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """It still generates. A pooling request is refused, and the error says why."""
    loaded = load_model(EngineConfig(model="tiny-llama", device="cpu"), plain=True)
    model: Any = loaded.model
    model.get_decoder = lambda: torch.nn.Identity()  # the model never calls it
    engine: Any = build_engine("embedding", loaded, num_pages=20)
    assert "the forward has not called its layers" in caplog.text
    with pytest.raises(ValueError, match="of models that have an output embedding"):
        engine.embed([[1, 2]])
    (output,) = engine.generate([[1, 2]], greedy(3), progress=False)
    assert output.finished
    engine.close()


def test_only_sampled_rows_get_logits(make_engine: EngineFactory) -> None:
    """The product with the vocabulary is not computed for the tokens of a pooling request."""
    engine: Any = make_engine(num_pages=40, cuda_graph=False)
    rows: list[int] = []
    head = engine.core.runner.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _, args, out: rows.append(out.shape[1]))
    try:
        engine.add_request([5, 6, 7], greedy(3, ignore_eos=True))
        engine.embed([[*range(3, 43)]] * 2, raw("MEAN"), progress=False)
        drain(engine)
    finally:
        hook.remove()
    assert rows == [1, 1, 1], "one row for each token of the text"


def test_pages_are_free_in_the_step_that_pools(make_engine: EngineFactory) -> None:
    """I3: one page is left to a request that goes on, and the others are free or cached."""
    engine: Any = make_engine(page_size=4, num_pages=40)
    engine.add_request([1, 2, 3], greedy(8, ignore_eos=True), "text")
    engine.step()
    engine.add_request([*range(3, 42)], raw("MEAN"), "vector")
    while engine.output_processor.is_in_use("vector"):
        outputs = {output.request_id: output for output in engine.step()}
    assert outputs["vector"].outputs.data is not None
    assert engine.core.scheduler.running == engine.output_processor.find("text")
    assert engine.stats().kv_tokens_reserved <= 12, "I3: pages of the vector are held"
    assert engine.stats().kv_pages_cached >= 9, "its whole pages are in the tree"
    drain(engine)


@pytest.mark.parametrize("before", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_gives_everything_back(make_engine: EngineFactory, kind: Any, before: int) -> None:
    """I3: waiting, between chunks, with the last chunk in flight, and after the end."""
    engine: Any = make_engine(page_size=4, num_pages=40, max_num_batched_tokens=16)
    name = engine.add_request([*range(3, 43)], raw(kind))
    outputs = [output for _ in range(before) for output in engine.step()]
    assert engine.abort_request(name) == (not outputs)
    if not outputs:
        (output,) = drain(engine)[name]
        assert (pooled(output).finish_reason, pooled(output).data) == ("abort", None)
    assert_idle(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_the_whole_context_is_accepted(make_engine: EngineFactory, kind: Any) -> None:
    engine: Any = make_engine(max_model_len=32, page_size=5, num_pages=20)
    prompt = [*range(3, 35)]
    (output,) = engine.embed([prompt], raw(kind), progress=False)
    assert error_of(output, expected_vector("tiny-llama", prompt, kind)) < 1e-5
    with pytest.raises(ValueError, match="prompt has 33 tokens, more than max_model_len=32"):
        engine.add_request([*prompt, 3], raw(kind))
    with pytest.raises(ValueError, match="with one output token"):
        engine.add_request(prompt, greedy(1))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"pooling_type": "CLS"}, "pooling_type must be one of LAST, MEAN"),
        ({"normalize": 1}, "normalize must be one of"), ({"dimensions": 0}, "dimensions must be"),
        ({"dimensions": 1.5}, "dimensions must be"), ({"dimensions": 65}, "dimensions must be at"),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused(
    make_engine: EngineFactory, values: dict[str, Any], named: str
) -> None:
    """I4: the error names the field, and no request is left."""
    engine: Any = make_engine(num_pages=20)
    with pytest.raises(ValueError, match=named):
        engine.embed([[1, 2]], PoolingParams(**values))
    with pytest.raises(ValueError, match="pooling_params must be PoolingParams, got"):
        engine.embed([[1, 2]], [greedy(2)])
    with pytest.raises(ValueError, match="params must be SamplingParams, got"):
        engine.generate([[1, 2]], [PoolingParams()])
    assert not engine.has_unfinished_requests()


def test_a_vector_is_cut_before_it_is_normalized(make_engine: EngineFactory) -> None:
    engine: Any = make_engine(num_pages=20)
    prompt = [*range(3, 20)]
    expected = expected_vector("tiny-llama", prompt, "MEAN")[:10]
    params = [PoolingParams("MEAN", dimensions=10), raw("MEAN", dimensions=10)]
    unit, plain = engine.embed([prompt, prompt], params, progress=False)
    assert unit.outputs.data.shape == (10,) and abs(unit.outputs.data.norm() - 1) < 1e-3
    assert error_of(unit, expected / expected.norm()) < 1e-5
    assert error_of(plain, expected) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_16_bits_gives_a_vector_in_32(make_engine: EngineFactory, kind: Any) -> None:
    """It has unit length to seven digits: sums, quotient and length are float32."""
    loaded = load_model(EngineConfig(model="tiny-llama", device="cpu", dtype="bfloat16"))
    engine: Any = make_engine(loaded, num_pages=40, max_num_batched_tokens=16)
    prompt = [*range(3, 43)]
    (output,) = engine.embed([prompt], PoolingParams(kind), progress=False)
    expected = expected_vector("tiny-llama", prompt, kind)
    assert error_of(output, expected / expected.norm()) < 0.05
    assert abs(float(pooled(output).data.double().norm()) - 1) < 1e-6  # type: ignore[union-attr]


@pytest.mark.parametrize(("value", "reason"), [(0.0, "stop"), (float("nan"), "error")])
def test_states_of_zeros_and_of_nan(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, value: float, reason: str
) -> None:
    """A vector of zeros stays as it is. States that are not finite end this request alone."""
    engine: Any = make_engine(num_pages=20)
    runner, pool = load("embedding", "model_runner"), load("embedding", "pooling").pool
    monkeypatch.setattr(runner, "pool", lambda states, tokens: value * pool(states, tokens))
    text = engine.add_request([5, 6], greedy(3, ignore_eos=True))
    name = engine.add_request([1, 2, 3], PoolingParams("MEAN"))
    finals = {name: outputs[-1] for name, outputs in drain(engine).items()}
    found = pooled(finals[name])
    assert found.finish_reason == reason
    assert found.data is None or not found.data.any()
    assert (found.error is None) == (reason == "stop")
    assert finals[text].outputs[0].finish_reason == "length"


def test_a_tokenizers_end_token_is_there_once_and_is_pooled(make_engine: EngineFactory) -> None:
    """The end token that the tokenizer adds to a text is not added again, and never cut off."""
    from tokenizers.processors import TemplateProcessing

    engine: Any = make_engine(num_pages=20)
    tokenizer = engine.input_processor.tokenizer
    plain, end = tokenizer.backend_tokenizer, tokenizer.eos_token_id
    before = plain.post_processor
    name = tokenizer.eos_token
    plain.post_processor = TemplateProcessing(single=f"$A {name}", special_tokens=[(name, end)])
    try:
        text, ids = engine.embed(["abc", tokenizer.encode("abc")], raw("LAST"), progress=False)
    finally:
        plain.post_processor = before
    assert text.prompt_token_ids == ids.prompt_token_ids
    assert text.prompt_token_ids.count(end) == 1 and text.prompt_token_ids[-1] == end
    assert error_of(text, expected_vector("tiny-llama", text.prompt_token_ids, "LAST")) < 1e-5


def test_what_the_prefix_cache_is_used_for(make_engine: EngineFactory) -> None:
    """LAST reads cached pages, MEAN does not. The pages of both serve any later request."""
    engine: Any = make_engine(page_size=4, num_pages=20)
    prompt = [*range(3, 26)]
    cached = []
    for kind in ("MEAN", "LAST", "MEAN"):
        (output,) = engine.embed([prompt], raw(kind), progress=False)
        cached.append(output.metrics.num_cached_tokens)
        assert error_of(output, expected_vector("tiny-llama", prompt, kind)) < 1e-5
    (text,) = engine.generate([prompt], greedy(2), progress=False)
    assert [*cached, text.metrics.num_cached_tokens] == [0, 20, 0, 20]


def test_a_vector_is_not_the_memory_of_a_step(make_engine: EngineFactory) -> None:
    """Later steps write to the buffers again. A result that was returned does not change."""
    engine: Any = make_engine(num_pages=20)
    (first,) = engine.embed([[5, 6, 7]], raw("LAST"), progress=False)
    kept = first.outputs.data.clone()
    for token in range(10, 14):
        engine.embed([[token, 6, 7]], raw("LAST"), progress=False)
    assert torch.equal(first.outputs.data, kept)


def test_a_retracted_mean_starts_again(make_engine: EngineFactory) -> None:
    """A text takes the pages of a prompt between two chunks. Its sum begins again from zero."""
    engine: Any = make_engine(page_size=4, num_pages=12, max_num_batched_tokens=9)
    prompt = [*range(3, 43)]
    force_retractions(engine.core.scheduler, 3)
    engine.add_request([9, 8, 7], greedy(6, ignore_eos=True))
    (output,) = engine.embed([prompt], raw("MEAN"), progress=False)
    assert engine.stats().num_retractions > 0
    assert error_of(output, expected_vector("tiny-llama", prompt, "MEAN")) < 1e-5
    drain(engine)


def test_retractions_of_vectors_teach_nothing_about_outputs(module_of: ModuleOf) -> None:
    """With pooling requests alone, the expected share of output tokens does not change."""
    engine = hash_engine(module_of("engine"), LateStream(), 12, page_size=2)
    for token in (1, 2):
        engine.add_request([token] * 20, raw("LAST"))
    vectors = list(engine.core.scheduler.waiting)
    engine.step()
    ratio = engine.core.scheduler.admission.new_token_ratio
    engine.core.scheduler.admission.expect_more(vectors)
    assert engine.core.scheduler.admission.new_token_ratio == ratio
    drain(engine)


def test_on_a_gpu_a_step_with_vectors_runs_without_a_graph(
    make_engine: EngineFactory, module_of: ModuleOf
) -> None:
    """A prompt of one token beside decodes looks like a decode batch. A graph has no states."""
    device = FakeCuda()
    with device.installed():
        loaded = load_model(EngineConfig(model="tiny-qwen3", device="cpu", model_passes="none"))
        engine: Any = make_engine(loaded, attention_backend="triton", max_num_seqs=3, num_pages=9)
        put_on_gpu(engine, module_of("stream"))
        graphs, runner = module_of("cuda_graph").DecodeGraphs, engine.core.runner
        max_pages = runner.inputs.page_table.shape[1]
        runner.graphs = graphs(runner.forward, [1, 2], max_pages, capture=True)
        text = engine.add_request([5, 6, 7], greedy(4, ignore_eos=True))
        outputs = [output for _ in range(2) for output in engine.step()]
        replays = [engine.stats().num_graph_replays]
        name = engine.add_request([9], raw("MEAN"))
        device.calls.clear()
        finals = drain(engine)
        replays.append(engine.stats().num_graph_replays)
    expected = expected_vector("tiny-qwen3", [9], "MEAN")
    assert error_of(finals[name][0], expected) < 1e-5
    assert outputs and len(finals[text][-1].outputs[0].token_ids) == 4
    assert engine.stats().num_steps - replays[1] == 2, "the prompt of the text, and the vector"
    assert "synchronize side" not in device.names() and "synchronize device" not in device.names()


def gaps(engine: Any, vectors: int, length: int) -> list[int]:
    """Return the steps between the tokens of four texts, with vectors that arrive beside them."""
    arrived: dict[str, int] = {}
    found: list[int] = []
    for i in range(4):
        engine.add_request([9, 8, 7 + i], greedy(16, ignore_eos=True))
    for step in range(200):
        if step % 3 == 1 and vectors:
            vectors -= 1
            engine.add_request([10 + vectors, *range(3, 2 + length)], raw("MEAN"))
        for output in engine.step():
            if not isinstance(output, PoolingRequestOutput):
                found.append(step - arrived.get(output.request_id, step - 1))
                arrived[output.request_id] = step
        if not engine.has_unfinished_requests():
            break
    return found


def test_neighbours_get_a_token_in_every_step(make_engine: EngineFactory) -> None:
    """Chunks of long prompts leave room for each decode: no text waits for a vector."""
    for vectors in (0, 5):
        engine: Any = make_engine(
            max_num_batched_tokens=16, page_size=4, max_num_seqs=8, num_pages=60
        )
        assert set(gaps(engine, vectors, 30)) == {1}
        assert engine.stats().prefill_tokens == 12 + 30 * vectors


def picture(module_of: ModuleOf) -> list[str]:
    """Return the lines of the picture on the elective's page: a run with pages of four tokens."""
    engine = hash_engine(
        module_of("engine"), LateStream(), 20, page_size=4, max_num_batched_tokens=8,
        enable_overlap=False,
    )  # fmt: skip
    prompt, rows, cells = [*range(14)], ("text", "MEAN", "LAST"), dict[tuple[str, int], str]()
    column = 0

    def note(batch: Any, _table: Any) -> None:
        for i, (name, count) in enumerate(scheduled(batch)):
            cells[name, column] = f"{count}*" if i in batch.pooled_indices else f"{count}"

    watch(engine.core.runner, "launch", note)
    engine.add_request([40, 41, 42], greedy(6, ignore_eos=True), "text")
    while engine.has_unfinished_requests():
        column += 1
        if column in (2, 5):
            kind = rows[1 if column == 2 else 2]
            engine.add_request(prompt, raw(kind), kind)
        engine.step()
    lines = ["step   " + "".join(f"{i:>4} " for i in range(1, column + 1))]
    for row in rows:
        shown = [cells.get((row, i), "") for i in range(1, column + 1)]
        lines.append(
            f"{row:7}" + "".join(f"{c:>4} " if c[-1:] != "*" else f"{c:>5}" for c in shown)
        )
    return [line.rstrip() for line in lines]


def test_the_picture_of_the_page_is_that_of_a_run(module_of: ModuleOf) -> None:
    page = (ROOT / course_place("embedding") / "README.md").read_text(encoding="utf-8")
    assert "\n".join(picture(module_of)) in page
