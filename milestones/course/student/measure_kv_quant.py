"""Measurements of kv_quant: what fits into memory, what 8 bits change, and what a step takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

from common import EngineConfig, LLMEngine, SamplingParams, load_model
from common.hf.loaded_model import LoadedModel

from ...chain import load
from .measure_channels import In4Bits
from .measuring import Row, lower_engine, milliseconds, prompts_of

MakeEngine = Callable[[EngineConfig, LoadedModel], Any]
Quality = tuple[list[dict[int, float]], list[list[int]]]  # log probabilities of a text; answers
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
    """kv_quant: 24 requests in the same memory, with each cache. sizes: pages of m5's pool.

    The counters do not depend on the machine.
    """
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    prompts = prompts_of([20 + 7 * i % 30 for i in range(24)])
    for size in map(int, sizes):
        memory = 0
        for name, make_engine in engines_of(milestone, "int8", "int4").items():
            page = page_bytes(make_engine, loaded)
            memory = memory or size * page
            config = EngineConfig(
                model=model, device="cpu", max_model_len=128, max_num_seqs=24, page_size=8,
                num_pages=memory // page, max_num_batched_tokens=64,
            )  # fmt: skip
            with make_engine(config, loaded) as engine:
                for prompt in prompts:
                    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
                    engine.add_request(prompt, params)
                most = 0
                while engine.has_unfinished_requests():
                    engine.step()
                    most = max(most, engine.stats().num_running)
                stats = engine.stats()
            yield (
                f"{memory / 1000:.0f}", name, f"{stats.kv_pages_total}", f"{most}",
                f"{stats.num_retractions}", f"{stats.num_steps}",
            )  # fmt: skip


def engines_of(milestone: str, *formats: str) -> dict[str, MakeEngine]:
    """Return engines by the numbers in their cache: m5's, and those with the given formats."""
    packed = load(milestone).LLMEngine
    return {
        "float32": load(lower_engine(milestone)).LLMEngine,
        **{name: partial(packed, kv_cache_dtype=name) for name in formats},
    }


def page_bytes(make_engine: MakeEngine, loaded: LoadedModel) -> int:
    """Return the bytes of a page of eight tokens, in all layers."""
    config = EngineConfig(
        model=loaded.name, device="cpu", num_pages=16, page_size=8, max_model_len=128
    )
    with make_engine(config, loaded) as engine:
        pool = engine.core.runner.kv_pool
        return sum(memory[:, 0].nbytes for memory in (*pool.keys, *pool.values))


def by_bits(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """kv_quant: what the cache changes, by scheme, and with fewer and fewer bits.

    The first row is m5. In the rows with a number of bits, lines still take a byte for each number:
    only the steps are wider. In the last rows, a query reads its own page in float.
    """
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    config = EngineConfig(model=model, device="cpu", attention_backend="torch")
    packing: Any = load(milestone, "packing")
    engines = engines_of(milestone, *load(milestone, "formats").FORMATS)
    lower, packed = engines["float32"], engines["int8"]
    with lower(config, loaded) as engine:
        plain = quality(engine)
    yield row_of("float32", plain, plain)
    for name in ("fp8", "int4"):
        with engines[name](config, loaded) as engine:
            yield row_of(name, plain, quality(engine))
    largest = packing.LARGEST
    for bits in map(int, sizes):
        packing.LARGEST = min(largest, 2 ** (bits - 1) - 1)
        try:
            with packed(config, loaded) as engine:
                found = quality(engine)
        finally:
            packing.LARGEST = largest
        yield row_of(f"{bits}", plain, found)
    for scheme in ("tokens", "rotated", "channels"):
        with lower(config, loaded) as engine:
            engine.core.runner.ops = In4Bits(engine.core.runner.ops, scheme)
            yield row_of(f"4, {scheme}", plain, quality(engine))


def row_of(name: str, plain: Quality, found: Quality) -> Row:
    """Return the row of a scheme. plain: what m5 has."""
    first = [same_tokens(*pair) for pair in zip(plain[1], found[1], strict=True)]
    return (
        name, f"{perplexity(found[0]):.3f}", f"{divergence(plain[0], found[0]):.6f}",
        ", ".join("-" if n == ANSWER else f"{n}" for n in first),
    )  # fmt: skip


def quality(engine: LLMEngine) -> Quality:
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
    """kv_quant: the time of a decode step of one request, with each cache. sizes: its context.

    The engines compute their steps in turns, so that all meet the same load of the machine.
    """
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    for size in map(int, sizes):
        config = EngineConfig(
            model=model, device="cpu", max_model_len=size + 2 * TURNS, max_num_seqs=1,
            num_pages=size // 16 + TURNS, enable_overlap=False,
        )  # fmt: skip
        makers = engines_of(milestone, *load(milestone, "formats").FORMATS)
        engines = {name: make(config, loaded) for name, make in makers.items()}
        params = SamplingParams(max_tokens=TURNS + 5, temperature=0, ignore_eos=True)
        for engine in engines.values():
            engine.add_request(prompts_of([size])[0], params)
            while not engine.step():
                """Compute the prompt."""
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _turn in range(TURNS):
            for name, engine in engines.items():
                begin = engine.now()
                engine.step()
                times[name].append(engine.now() - begin)
        for name, engine in engines.items():
            engine.close()
            megabytes = page_bytes(makers[name], loaded) / 8 * size / 1e6
            ratio = median(a / b for a, b in zip(times["float32"], times[name], strict=True))
            yield (
                f"{size}", name, f"{megabytes:.1f}", milliseconds(times[name]), f"{ratio:.2f}"
            )  # fmt: skip
