"""The measurements of the electives: each beside the milestone below, on the same requests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from common import (
    EMBEDDED_MODEL,
    EngineConfig,
    PoolingParams,
    PoolingRequestOutput,
    SamplingParams,
    load_model,
)
from common.displays.workload import Workload, percentile, run

from ...chain import below, load, short
from .measure_hybrid import WINDOWED, by_context
from .measure_lora import by_batch
from .measure_priority import by_urgency
from .measuring import TINY, Measurement, Row, measured, milliseconds, prompts_of


def by_plan(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """multi_step: plans of so many steps, below the milestone's overlap, on the same requests.

    A request arrives every 20 ms, and forwards take 4 ms (emulated). About one token in 24 ends its
    request, which no plan can know.
    """
    prompts = prompts_of([8] * 32)
    config = {"model": model, "max_num_seqs": 16, "max_model_len": 96, "emulated_forward_ms": 4}
    arrivals = [0.02 * number for number in range(len(prompts))]
    workload = Workload(prompts, [48] * len(prompts), config=config, arrivals=arrivals)
    for size in (0, *map(int, sizes)):
        engine_of = milestone if size else below(milestone)
        assert engine_of is not None, "an elective lies on a milestone"
        result = measured(engine_of, workload, num_steps=size or None, ends=range(0, 256, 24))
        tokens = sum(map(len, result.token_ids))
        vain = result.stats["padding_tokens"]
        yield (
            f"{size}" if size else f"{short(engine_of)}, overlapped", f"{tokens}", f"{vain}",
            f"{vain / (vain + tokens):.1%}", milliseconds(result.first_token_seconds),
            f"{1e3 * percentile(result.first_token_seconds, 95):.2f}",
            milliseconds(result.inter_token_seconds), f"{result.tokens_per_second:.0f}",
        )  # fmt: skip


def by_text(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """speculative: repetitive and free text, beside the milestone below. The tokens are equal."""
    lower = below(milestone)
    assert lower is not None, "an elective lies on a milestone"
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    texts = {
        "repetitive": "The lamp number {i} is on. The lamp number {i} is off. " * 6,
        "free": "Write a long story about town number {i} at the sea, its people and its weather.",
    }
    for (name, text), size in product(texts.items(), map(int, sizes)):
        prompts = [loaded.tokenizer.encode(text.replace("{i}", f"{i}")) for i in range(size)]
        workload = Workload(prompts, [48] * size, True, {"model": model, "max_num_seqs": 16})
        plain = measured(lower, workload, loaded=loaded)
        config = EngineConfig(device="cpu", **workload.config)
        with load(milestone).LLMEngine(config, loaded) as engine:
            run(engine, workload.warm_up())
            engine.reset_prefix_cache()
            before, ours, after = engine.stats(), run(engine, workload), engine.stats()
        drafted = after.num_draft_tokens - before.num_draft_tokens
        accepted = after.num_accepted_tokens - before.num_accepted_tokens
        yield (
            name, f"{size}", f"{plain.stats['num_steps']}", f"{ours.stats['num_steps']}",
            f"{drafted}", f"{accepted}", f"{plain.tokens_per_second:.0f}",
            f"{ours.tokens_per_second:.0f}",
            f"{ours.tokens_per_second / plain.tokens_per_second:.2f}",
        )  # fmt: skip


def by_grammar(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """structured_output: the gap between forwards, with grammars and without, in four loops."""
    gaps = load(milestone, "demo.gaps")
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    for size in map(int, sizes):
        found = gaps.measure(loaded, gaps.LOOPS, num_requests=size, max_tokens=24, forward_ms=10.0)
        for name, of_loop in found.items():
            rate = of_loop.tokens_per_second
            ratio = rate / found[gaps.LOOPS[0].name].tokens_per_second
            yield f"{size}", name, f"{of_loop.median_ms:.2f}", f"{rate:.0f}", f"{ratio:.2f}"


def by_budget(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """embedding: eight texts, alone and beside twelve vectors of prompts with 120 tokens.

    sizes: tokens of a step. Steps and tokens do not depend on the machine.
    """
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    for size, num_vectors in product(map(int, sizes), (0, 12)):
        config = EngineConfig(
            model=model, device="cpu", max_num_seqs=16, max_model_len=128, page_size=4,
            num_pages=600, max_num_batched_tokens=size,
        )  # fmt: skip
        with load(milestone).LLMEngine(config, loaded) as engine:
            gaps, waits = steps_beside(engine, prompts_of([120] * num_vectors, 1))
            num_steps = engine.stats().num_steps
        steps, tokens = [gap[0] for gap in gaps], [float(gap[1]) for gap in gaps]
        yield (
            f"{size}", f"{num_vectors}", f"{max(steps)}", f"{percentile(tokens, 50):g}",
            f"{max(tokens):g}", f"{percentile(waits, 50):g}" if waits else "", f"{num_steps}",
        )  # fmt: skip


def steps_beside(
    engine: Any, prompts: list[list[int]]
) -> tuple[list[tuple[int, int]], list[float]]:
    """Run eight texts of 32 tokens, and a vector that arrives every second step.

    Returns the steps, and the computed tokens, between two tokens of a text; and the steps that
    each vector takes.
    """
    last: dict[str, tuple[int, int]] = {}
    gaps: list[tuple[int, int]] = []
    waits: list[float] = []
    arrived: dict[str, int] = {}
    for prompt in prompts_of([8] * 8):
        engine.add_request(prompt, SamplingParams(32, temperature=0, ignore_eos=True))
    step = 0
    while engine.has_unfinished_requests():
        step += 1
        if prompts and step % 2 == 0:
            arrived[engine.add_request(prompts.pop(), PoolingParams("MEAN"))] = step
        outputs, stats = engine.step(), engine.stats()
        place = (stats.num_steps, stats.prefill_tokens + stats.decode_tokens)
        for output in outputs:
            if isinstance(output, PoolingRequestOutput):
                waits.append(step - arrived[output.request_id] + 1)
                continue
            if (before := last.get(output.request_id)) is not None:
                gaps.append((place[0] - before[0], place[1] - before[1]))
            last[output.request_id] = place
    return gaps, waits


ELECTIVES = {
    "multi_step": Measurement(
        (
            "steps per plan", "tokens", "in vain", "share", "TTFT p50, ms", "TTFT p95, ms",
            "ITL p50, ms", "tokens/s",
        ),
        by_plan, TINY, (1, 2, 4, 8),
    ),
    "structured_output": Measurement(
        ("requests", "loop", "gap, ms", "tokens/s", "ratio"), by_grammar, EMBEDDED_MODEL, (1, 8),
    ),
    "speculative": Measurement(
        (
            "text", "requests", "steps, m5", "steps", "drafted", "accepted", "tokens/s, m5",
            "tokens/s", "ratio",
        ),
        by_text, EMBEDDED_MODEL, (1, 16),
    ),
    "lora": Measurement(
        ("adapters", "way", "steps", "ratio"), by_batch, EMBEDDED_MODEL, (8,),
    ),
    "hybrid_memory": Measurement(
        ("tokens", "layers alike", "most", "at the end", "share"),
        by_context, WINDOWED, (32, 64, 128, 256, 480),
    ),
    "priority": Measurement(
        (
            "load", "engine", "urgent TTFT p50, steps", "p95", "others p50", "steps", "computed",
            "cached", "preempted", "pages loaded",
        ),
        by_urgency, TINY, (0, 2),
    ),
    "embedding": Measurement(
        (
            "budget", "vectors", "gap, steps", "gap, tokens p50", "gap, tokens max",
            "vector, steps p50", "steps",
        ),
        by_budget, TINY, (16, 32, 64, 256),
    ),
}  # fmt: skip
