"""The measurements of the electives: each beside the milestone below, on the same requests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from common import EMBEDDED_MODEL, EngineConfig, SamplingParams, load_model
from common.displays.workload import Workload, percentile, run

from ...chain import below, load, short
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


def by_urgency(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """priority: urgent requests under load, and conversations that the pool cannot hold.

    Times are in steps, so they do not depend on the machine. sizes: host pages for each page of the
    pool. A copy is taken to be faster than computing its tokens.
    """
    lower = below(milestone)
    assert lower is not None, "an elective lies on a milestone"
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    config = EngineConfig(
        model=model, device="cpu", max_num_seqs=4, max_model_len=128, page_size=4, num_pages=96
    )
    loads: dict[str, list[Arrival]] = {
        "urgent": [
            *(Arrival(5 * i, prompt, 1) for i, prompt in enumerate(prompts_of([48] * 24))),
            *(Arrival(20 + 12 * i, prompt, 0) for i, prompt in enumerate(prompts_of([16] * 8, 1))),
        ],
        "turns": [
            Arrival(200 * turn + 24 * i, prompt[: 24 * (turn + 1)], 0)
            for turn in range(3)
            for i, prompt in enumerate(prompts_of([72] * 8, 2))
        ],
    }
    for load_name, arrivals in loads.items():
        for size in (None, *sizes):
            with load(lower if size is None else milestone).LLMEngine(config, loaded) as engine:
                if size is not None:
                    resize_host(engine, int(size * config_pages(config)))
                waits = steps_to_first_token(engine, arrivals, has_priorities=size is not None)
                stats, retraction = engine.stats(), engine.scheduler.retraction
                loaded_pages = getattr(engine.scheduler.kv_cache.radix_cache, "num_loaded", 0)
            urgent, others = ([w for w, p in waits if p == level] for level in (0, 1))
            yield (
                load_name, short(lower) if size is None else f"host x {size:g}",
                f"{percentile(urgent, 50):g}", f"{percentile(urgent, 95):g}",
                f"{percentile(others, 50):g}" if others else "", f"{stats.num_steps}",
                f"{stats.prefill_tokens + stats.decode_tokens}", f"{stats.cached_prompt_tokens}",
                f"{getattr(retraction, 'num_preemptions', 0)}", f"{loaded_pages}",
            )  # fmt: skip


class Arrival(NamedTuple):
    """A request that arrives before a step."""

    step: int
    prompt: list[int]
    priority: int


def config_pages(config: EngineConfig) -> int:
    """Return the pages of the pool, which the measurement has given."""
    assert config.num_pages is not None
    return config.num_pages


def resize_host(engine: Any, num_pages: int) -> None:
    """Let an engine of `priority` use so many host pages. It must not have run yet."""
    cache = engine.scheduler.kv_cache.radix_cache
    cache.num_host_pages, cache.free_host_pages = num_pages, list(range(num_pages))
    engine.costs.page_seconds = 0.0


def steps_to_first_token(
    engine: Any, arrivals: list[Arrival], has_priorities: bool
) -> list[tuple[float, int]]:
    """Run requests of 16 output tokens. Return the steps that each waits, and its priority."""
    waits: dict[str, tuple[float, int]] = {}
    coming, started, step = sorted(arrivals), dict[str, Arrival](), 0
    while coming or engine.has_unfinished_requests():
        while coming and coming[0].step <= step:
            arrival = coming.pop(0)
            more = {"priority": arrival.priority} if has_priorities else {}
            params = SamplingParams(16, temperature=0, ignore_eos=True)
            started[engine.add_request(arrival.prompt, params, **more)] = arrival
        step += 1
        for output in engine.step():
            arrival = started[output.request_id]
            waits.setdefault(output.request_id, (step - arrival.step, arrival.priority))
    return list(waits.values())


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
    "priority": Measurement(
        (
            "load", "engine", "urgent TTFT p50, steps", "p95", "others p50", "steps", "computed",
            "cached", "preempted", "pages loaded",
        ),
        by_urgency, TINY, (0, 2),
    ),
}  # fmt: skip
