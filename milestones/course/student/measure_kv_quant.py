"""Measurements of kv_quant: what fits into memory, what 8 bits change, and what a step takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import Any

from common import EngineConfig, LLMEngine, SamplingParams, load_model
from common.hf.loaded_model import LoadedModel

from ...chain import load, short
from .measuring import Row, lower_engine, milliseconds, prompts_of

LIKELY, FOUND = 20, 400  # tokens that a divergence compares, and that a table is asked for
ANSWER = 100  # tokens
TURNS = 40  # decode steps of each engine
TEXT = (
    "A cache keeps the keys and the values of all tokens that a model has read. Without it, each "
    "new token would need all earlier tokens again. The cache grows with every token, and soon it "
    "is larger than the weights of the model. An engine divides its memory into pages, as an "
    "operating system does, and gives a request one page after the other. When no page is free, "
    "a request must wait, or give back what it has. If each number takes one byte and not four, "
    "the same memory holds almost four times as many tokens, so more requests run together. The "
    "numbers are then a little wrong. The question is whether the next word is still the same."
)


def by_memory(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """kv_quant: 24 requests in the same memory, on both engines. sizes: pages of m5's pool.

    The counters do not depend on the machine.
    """
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    prompts = prompts_of([20 + 7 * i % 30 for i in range(24)])
    for size in map(int, sizes):
        memory = 0
        for name in (lower_engine(milestone), milestone):
            page = page_bytes(name, loaded)
            memory = memory or size * page
            config = EngineConfig(
                model=model, device="cpu", max_model_len=128, max_num_seqs=24, page_size=8,
                num_pages=memory // page, max_num_batched_tokens=64,
            )  # fmt: skip
            with load(name).LLMEngine(config, loaded) as engine:
                for prompt in prompts:
                    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
                    engine.add_request(prompt, params)
                most = 0
                while engine.has_unfinished_requests():
                    engine.step()
                    most = max(most, engine.stats().num_running)
                stats = engine.stats()
            yield (
                f"{memory / 1000:.0f}", short(name), f"{stats.kv_pages_total}", f"{most}",
                f"{stats.num_retractions}", f"{stats.num_steps}",
            )  # fmt: skip


def page_bytes(name: str, loaded: LoadedModel) -> int:
    """Return the bytes of a page of eight tokens, in all layers."""
    config = EngineConfig(
        model=loaded.name, device="cpu", num_pages=16, page_size=8, max_model_len=128
    )
    with load(name).LLMEngine(config, loaded) as engine:
        pool = engine.core.runner.kv_pool
        return sum(memory[:, 0].nbytes for memory in (*pool.keys, *pool.values))


def by_bits(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """kv_quant: what the cache changes, with fewer and fewer bits. The first row is m5.

    With less than eight bits, lines still take a byte for each number: only the steps are wider.
    """
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    packing: Any = load(milestone, "packing")
    plain: tuple[list[dict[int, float]], list[list[int]]] | None = None
    for bits in (32, *map(int, sizes)):
        largest = packing.LARGEST
        config = EngineConfig(model=model, device="cpu", attention_backend="torch")
        name = lower_engine(milestone) if bits == 32 else milestone
        packing.LARGEST = min(largest, 2 ** (bits - 1) - 1)
        try:
            with load(name).LLMEngine(config, loaded) as engine:
                found = quality(engine)
        finally:
            packing.LARGEST = largest
        plain = plain or found
        first = [same_tokens(*pair) for pair in zip(plain[1], found[1], strict=True)]
        yield (
            "float32" if bits == 32 else f"{bits}", f"{perplexity(found[0]):.3f}",
            f"{divergence(plain[0], found[0]):.6f}",
            ", ".join("-" if n == ANSWER else f"{n}" for n in first),
        )  # fmt: skip


def quality(engine: LLMEngine) -> tuple[list[dict[int, float]], list[list[int]]]:
    """Return the log probabilities of the tokens of a text, and greedy answers."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=FOUND)
    (scored,) = engine.generate([TEXT], params, progress=False)
    assert scored.prompt_logprobs is not None
    rows = [row for row in scored.prompt_logprobs if row is not None]
    greedy = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    words = TEXT.split(". ")
    answers = engine.generate(words[:6], greedy, progress=False)
    return rows, [answer.outputs[0].token_ids for answer in answers]


def perplexity(rows: list[dict[int, float]]) -> float:
    """Return exp of the mean negative log probability. The token of the text comes first."""
    return math.exp(-sum(next(iter(row.values())) for row in rows) / len(rows))


def divergence(plain: list[dict[int, float]], packed: list[dict[int, float]]) -> float:
    """Return the mean KL divergence of the likely tokens of `plain`, and all others as one event.

    Joining events makes a divergence smaller, never larger. A token that `packed` does not list
    counts with the probability of the last one that it lists.
    """
    total = 0.0
    for ours, theirs in zip(plain, packed, strict=True):
        least = min(theirs.values())
        rest_p = rest_q = 1.0
        for token, value in sorted(ours.items(), key=lambda item: -item[1])[:LIKELY]:
            other = theirs.get(token, least)
            total += math.exp(value) * (value - other)
            rest_p, rest_q = rest_p - math.exp(value), rest_q - math.exp(other)
        if rest_p > 1e-9 and rest_q > 1e-9:
            total += rest_p * math.log(rest_p / rest_q)
    return total / len(plain)


def same_tokens(ours: list[int], theirs: list[int]) -> int:
    """Return the number of tokens before the first difference."""
    equal = (a == b for a, b in zip(ours, theirs, strict=True))
    return next((n for n, same in enumerate(equal) if not same), len(ours))


def by_context(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """kv_quant: the time of a decode step of one request, on both engines. sizes: its context.

    The engines compute their steps in turns, so that both meet the same load of the machine.
    """
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    for size in map(int, sizes):
        config = EngineConfig(
            model=model, device="cpu", max_model_len=size + 2 * TURNS, max_num_seqs=1,
            num_pages=size // 16 + TURNS, enable_overlap=False,
        )  # fmt: skip
        names = (lower_engine(milestone), milestone)
        engines = [load(name).LLMEngine(config, loaded) for name in names]
        params = SamplingParams(max_tokens=TURNS + 5, temperature=0, ignore_eos=True)
        for engine in engines:
            engine.add_request(prompts_of([size])[0], params)
            while not engine.step():
                """Compute the prompt."""
        times: tuple[list[float], list[float]] = ([], [])
        for _turn in range(TURNS):
            for engine, taken in zip(engines, times, strict=True):
                begin = engine.now()
                engine.step()
                taken.append(engine.now() - begin)
        for engine in engines:
            engine.close()
        megabytes = [page_bytes(name, loaded) / 8 * size / 1e6 for name in names]
        ratio = median(a / b for a, b in zip(*times, strict=True))
        yield (
            f"{size}",
            *(f"{x:.1f}" for x in megabytes),
            *map(milliseconds, times),
            f"{ratio:.2f}",
        )
