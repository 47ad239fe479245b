"""Measurements of times. Compare only ratios of one run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from common import EngineConfig, LoRARequest, SamplingParams, load_model
from common.displays.workload import Workload, percentile, run

from ...chain import load, short
from ...lab.instruments.random_adapter import write_adapter
from .measuring import Row, lower_engine, measured, milliseconds, prompts_of

ROUNDS = 2  # of lora's ways
NUM_REQUESTS = 16
RANK, OUTPUT = 8, 16


def by_context(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m1: four steps after a prompt of each length."""
    for size in sizes:
        row = [f"{size:.0f}"]
        config = {"model": model, "max_model_len": int(size) + 8}
        for use_cache in (True, False):
            workload = Workload(prompts_of([int(size)]), [5], True, config)
            result = measured(milestone, workload, use_cache=use_cache)
            fed = result.stats["prefill_tokens"] + result.stats["decode_tokens"] - int(size)
            row += [f"{fed / 4:.1f}", milliseconds(result.inter_token_seconds)]
        yield tuple(row)


def by_rows(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m2: steps in which that many requests decode together."""
    for size in map(int, sizes):
        config = {"model": model, "max_num_seqs": size, "max_model_len": 64}
        workload = Workload(prompts_of([16] * size), [9] * size, True, config)
        result = measured(milestone, workload)
        step = median(result.inter_token_seconds)
        yield f"{size}", f"{1e3 * step:.2f}", f"{1e3 * step / size:.2f}"


def by_forward(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m5: steps with emulated forwards of that many milliseconds, serial and overlapped."""
    for size in sizes:
        result = {}
        for overlap in (False, True):
            config = {
                "model": model, "max_num_seqs": 32, "max_model_len": 64,
                "emulated_forward_ms": size, "enable_overlap": overlap,
            }  # fmt: skip
            workload = Workload(prompts_of([8] * 32), [24] * 32, True, config)
            result[overlap] = measured(milestone, workload)
        host, forward = median(result[False].gap_seconds), median(result[False].forward_seconds)
        yield (
            f"{size:g}", f"{1e3 * host:.2f}", f"{1e3 * forward:.2f}",
            f"{1e3 * (host + forward):.2f}", milliseconds(result[False].inter_token_seconds),
            f"{1e3 * max(host, forward):.2f}", milliseconds(result[True].inter_token_seconds),
        )  # fmt: skip


def by_plan(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """multi_step: plans of that many steps, below the milestone's overlap, on the same requests.

    A request arrives every 20 ms, and forwards take 4 ms (emulated). About one token in 24 ends its
    request, which no plan can know.
    """
    prompts = prompts_of([8] * 32)
    config = {"model": model, "max_num_seqs": 16, "max_model_len": 96, "emulated_forward_ms": 4}
    arrivals = [0.02 * number for number in range(len(prompts))]
    workload = Workload(prompts, [48] * len(prompts), config=config, arrivals=arrivals)
    for size in (0, *map(int, sizes)):
        engine_of = milestone if size else lower_engine(milestone)
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
    """speculative: texts with prompt lookup, and one that was asked before with `SuffixDrafter`.

    The tokens are those of the milestone below.
    """
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    free = "Write a long story about town number {i} at the sea, its people and its weather."
    texts = {
        "repetitive": "The lamp number {i} is on. The lamp number {i} is off. " * 6,
        "free": free,
        "asked before": free,
    }
    for (name, text), size in product(texts.items(), map(int, sizes)):
        prompts = [loaded.tokenizer.encode(text.replace("{i}", f"{i}")) for i in range(size)]
        workload = Workload(prompts, [48] * size, True, {"model": model, "max_num_seqs": 16})
        plain = measured(lower_engine(milestone), workload, loaded=loaded)
        config = EngineConfig(device="cpu", **workload.config)
        asked_before = name == "asked before"
        drafter = load(milestone, "suffix_drafter").SuffixDrafter() if asked_before else None
        with load(milestone).LLMEngine(config, loaded, drafter) as engine:
            run(engine, workload if asked_before else workload.warm_up())
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


def by_batch(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """lora: requests of this many adapters, all in one batch, one after the other, and none.

    The ways take turns on one engine. The ratio is that of the medians to the first way.
    """
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    for size in map(int, sizes):
        config = EngineConfig(
            model=model, device="cpu", max_num_seqs=NUM_REQUESTS, max_model_len=128,
            max_loras=size, max_lora_rank=RANK,
        )  # fmt: skip
        with (
            tempfile.TemporaryDirectory() as folder,
            load(milestone).LLMEngine(config, loaded) as engine,
        ):
            adapters = [made(engine, Path(folder), number) for number in range(size)]
            requests = [
                (p, adapters[i % size]) for i, p in enumerate(prompts_of([16] * NUM_REQUESTS))
            ]
            of_adapter = [[r for r in requests if r[1] is adapter] for adapter in adapters]
            ways: dict[str, list[list[Any]]] = {
                "one after the other": of_adapter,
                "one batch": [requests],
                "one batch, no adapter": [[(prompt, None) for prompt, _adapter in requests]],
            }
            found = in_turn(engine, ways)
        first = median(seconds for seconds, _steps in found["one after the other"])
        for way, rounds in found.items():
            ratio = first / median(seconds for seconds, _steps in rounds)
            yield f"{size}", way, f"{rounds[-1][1]}", f"{ratio:.2f}"


def made(engine: Any, folder: Path, number: int) -> LoRARequest:
    """Load a random adapter for all linear layers. Return its request."""
    name = f"adapter-{number}"
    path = write_adapter(folder / name, engine.adapters.shapes, number, r=RANK, size=0.02)
    engine.add_lora(adapter := LoRARequest(name, path))
    return adapter


def in_turn(engine: Any, ways: dict[str, list[list[Any]]]) -> dict[str, list[tuple[float, int]]]:
    """Serve each way several times. Return the seconds and the steps of each round.

    In the first round the adapters get their slots. It does not count.
    """
    found: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
    for number in range(ROUNDS + 1):
        for way, batches in ways.items():
            before, started = engine.stats().num_steps, time.perf_counter()
            for batch in batches:
                serve(engine, batch)
            seconds = time.perf_counter() - started
            if number > 0:
                found[way].append((seconds, engine.stats().num_steps - before))
            engine.reset_prefix_cache()
    return found


def serve(engine: Any, requests: list[tuple[list[int], LoRARequest | None]]) -> None:
    """Serve requests together."""
    params = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    for prompt, adapter in requests:
        engine.add_request(prompt, params, lora_request=adapter)
    while engine.has_unfinished_requests():
        engine.step()
