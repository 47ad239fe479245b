"""Measurements of the elective `invariance`: answers, the first difference, and scores."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from typing import Any

import torch

from common import EngineConfig, LoadedModel, SamplingParams, load_model

from ...chain import load
from .measuring import Row, prompts_of

PROMPT, NUM_TOKENS, NUM_SEQS = "Once upon a time, in a small town", 32, 16
CONFIG: dict[str, Any] = {
    "device": "cpu", "max_num_seqs": NUM_SEQS, "max_model_len": 192, "num_pages": 256,
    "max_num_batched_tokens": 48, "enable_overlap": False,
}  # fmt: skip
GREEDY = SamplingParams(NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
SAMPLED = SamplingParams(NUM_TOKENS, temperature=1, seed=7, ignore_eos=True, logprobs=0)
SCORED = SamplingParams(1, temperature=0, prompt_logprobs=0)


class Engines:
    """Makes engines of all variants. Their model is in memory twice: fast, and readable."""

    def __init__(self, milestone: str, model: str) -> None:
        self.package, self.model = load(milestone), model
        self.variants = load(milestone, "variants").VARIANTS
        self.loaded: dict[bool, LoadedModel] = {
            readable: load_model(EngineConfig(model=model, device="cpu", readable=readable))
            for readable in (False, True)
        }

    def __call__(self, variant: str, **config: Any) -> Any:
        made = EngineConfig(model=self.model, **CONFIG | config)
        return self.package.LLMEngine(made, self.loaded[variant != "exact"], variant=variant)


def by_variant(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """invariance: the answers to one prompt among random requests. sizes: the number of runs."""
    engines, differences = Engines(milestone, model), load(milestone, "first_difference")
    (num_runs,) = map(int, sizes)
    for name in engines.variants:
        alone, among = (recorded(engines, name, count) for count in (0, 7))
        first = differences.first_difference(alone, among)
        where = (f"{first.position}", short_name(first.operation)) if first else ("", "")
        texts, logprobs, rate = answers(engines(name), num_runs)
        yield name, f"{texts}", f"{logprobs}", *where, f"{rate:.0f}"


def answers(engine: Any, num_runs: int) -> tuple[int, int, float]:
    """Ask the same prompt `num_runs` times, while other requests come and go.

    Returns the number of different texts, that of different log probabilities, and the tokens that
    the engine computes in a second.
    """
    drawn, names = random.Random(0), set[str]()
    texts, logprobs = set[tuple[int, ...]](), set[tuple[float, ...]]()
    wanted, done, begin = 1, 0, time.perf_counter()
    with engine:
        while done < num_runs:
            if drawn.random() < 0.2:
                wanted = drawn.randint(1, NUM_SEQS)
                engine.reset_prefix_cache()  # otherwise, all runs have the first one's prompt
            while len(engine.queued_requests()) < wanted:
                if drawn.random() < 0.5:
                    names.add(engine.add_request(PROMPT, GREEDY))
                else:
                    (prompt,) = prompts_of([drawn.randint(1, 60)], drawn.randrange(10**6))
                    count = drawn.randint(1, NUM_TOKENS)
                    engine.add_request(prompt, SamplingParams(count, temperature=0))
            for output in engine.step():
                if output.finished and output.request_id in names and done < num_runs:
                    done += 1
                    texts.add(tuple(output.outputs[0].token_ids))
                    logprobs.add(tuple(logprobs_of(output)))
        stats = engine.stats()
        for request in engine.queued_requests():
            engine.abort_request(request.request_id)
        engine.step()
    seconds = time.perf_counter() - begin
    return len(texts), len(logprobs), (stats.prefill_tokens + stats.decode_tokens) / seconds


def logprobs_of(output: Any) -> list[float]:
    """Return the log probabilities of the tokens of an output."""
    return [row[token] for row, token in zip(
        output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True
    )]  # fmt: skip


def recorded(engines: Engines, name: str, num_others: int) -> Any:
    """Return the recording of one run beside some other requests."""
    recording = load(engines.package.__name__.rpartition(".")[2], "first_difference").recording
    budget = 16 if num_others else CONFIG["max_num_batched_tokens"]  # chunks of other sizes, too
    made = engines(name, max_num_batched_tokens=budget)
    with made as engine, recording(engine, "asked") as found:
        for prompt in prompts_of([11 + 5 * i for i in range(num_others)], 1):
            engine.add_request(prompt, GREEDY)
        engine.add_request(PROMPT, GREEDY, "asked")
        while engine.has_unfinished_requests():
            engine.step()
    return found


def short_name(operation: str) -> str:
    """Return the name of an operation without the parts that all names have."""
    return re.sub(r"model\.(layers\.)?|self_attn\.|mlp\.", "", operation)


def by_layer(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """invariance: the largest difference after some layers, alone and among seven requests.

    sizes: where in the model, as a share of its layers.
    """
    engines = Engines(milestone, model)
    num_layers = engines.loaded[True].model.config.num_hidden_layers
    for name in engines.variants:
        alone, among = (recorded(engines, name, count) for count in (0, 7))
        places = [f"model.layers.{int(s * (num_layers - 1))}.mlp.down_proj" for s in sizes]
        row = [largest(alone.rows, among.rows, place) for place in [*places, "lm_head"]]
        yield name, *(f"{value:.1e}" if value else "0" for value in row)


def largest(a: Any, b: Any, operation: str) -> float:
    """Return the largest difference of an operation, up to the first token that differs."""
    found = 0.0
    for position in sorted(a.keys() & b.keys()):
        token = "model.embed_tokens"
        if not torch.equal(a[position][token], b[position][token]):
            break
        if operation in a[position] and operation in b[position]:
            both = a[position][operation], b[position][operation]
            found = max(found, float((both[0] - both[1]).abs().max()))
    return found


def by_scorer(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """invariance: log probabilities that were sampled, against those of a second computation.

    sizes: the tokens of a step of the second computation.
    """
    engines = Engines(milestone, model)
    (budget,) = map(int, sizes)
    for name in engines.variants:
        with engines(name) as engine:
            others = prompts_of([9, 30, 17], 2)
            output = engine.generate([PROMPT, *others], SAMPLED, progress=False)[0]
        sampled, tokens = logprobs_of(output), output.prompt_token_ids + output.outputs[0].token_ids
        again = scored(engines, name, tokens, budget)[-NUM_TOKENS:]
        yield name, "itself", difference(sampled, again)
        if name in ("exact", "fixed"):
            yield name, "Hugging Face", difference(sampled, reference(engines, tokens))


def scored(engines: Engines, name: str, tokens: list[int], budget: int) -> list[float]:
    """Return the log probabilities of all tokens but the first, in chunks and among others."""
    with engines(name, max_num_batched_tokens=budget) as engine:
        prompts = [*prompts_of([5, 40], 3), tokens]
        output = engine.generate(prompts, SCORED, progress=False)[-1]
    found = zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
    return [row[token] for row, token in found]


@torch.inference_mode()
def reference(engines: Engines, tokens: list[int]) -> list[float]:
    """Return those of the last tokens by the model's own forward of the whole sequence."""
    logits = engines.loaded[True].model(input_ids=torch.tensor([tokens])).logits[0, :-1]
    chosen = logits.float().log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])
    found: list[float] = chosen[-NUM_TOKENS:, 0].tolist()
    return found


def difference(a: list[float], b: list[float]) -> str:
    """Return the largest difference, as text: 0 is exact."""
    value = max(abs(x - y) for x, y in zip(a, b, strict=True))
    return f"{value:.1e}" if value else "0"
