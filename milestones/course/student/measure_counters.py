"""Measurements of m2 to m4 that count pages, tokens and steps: the same on every machine."""

from __future__ import annotations

import random
from collections.abc import Iterator

from common import EngineConfig, SamplingParams, load_model
from common.displays.workload import Workload

from ...chain import load
from .measuring import Row, measured, prompts_of, short_and_long

# A model of a GPU's step, for 8 billion weights in bf16: reading them at 2 TB/s takes 8 ms, and the
# 16 GFLOP of a token take 0.1 ms at 160 TFLOP/s.
STEP_MS, TOKEN_MS = 8.0, 0.1


def by_batching(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m2: requests in static groups, of which each ends before the next begins, and continuous."""
    requests = short_and_long()
    for size in map(int, sizes):
        static = [requests[i : i + size] for i in range(0, len(requests), size)]
        for name, groups in (("static", static), ("continuous", [requests])):
            config = EngineConfig(model=model, device="cpu", max_num_seqs=size, max_model_len=96)
            with load(milestone).LLMEngine(config) as engine:
                for group in groups:
                    for prompt, max_tokens in group:
                        params = SamplingParams(
                            max_tokens=max_tokens, temperature=0, ignore_eos=True
                        )
                        engine.add_request(prompt, params)
                    while engine.has_unfinished_requests():
                        engine.step()
                stats = engine.stats()
            num_tokens = sum(max_tokens for _, max_tokens in requests)
            yield (
                f"{size}", name, f"{stats.num_steps}", f"{stats.padding_tokens}",
                f"{num_tokens / stats.num_steps:.1f}",
            )  # fmt: skip


def by_page_size(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m3: the same requests, in pools of as many tokens, divided into pages of another size."""
    drawn = random.Random(7)
    lengths = [drawn.randint(8, 40) for _ in range(48)]
    wanted = [drawn.randint(4, 24) for _ in lengths]
    for size in map(int, sizes):
        config = {
            "model": model, "max_num_seqs": 48, "max_model_len": 64, "page_size": size,
            "num_pages": 1024 // size, "attention_backend": "torch",
        }  # fmt: skip
        result = measured(milestone, Workload(prompts_of(lengths), wanted, True, config))
        waste = result.kv_waste
        assert waste is not None, "the requests hold memory"
        steps, retractions = result.stats["num_steps"], result.stats["num_retractions"]
        yield f"{size}", f"{result.most_running}", f"{waste:.0%}", f"{steps}", f"{retractions}"


def by_chunk(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m3: a prompt of 480 tokens arrives beside 8 decoding requests. sizes: tokens of a step.

    Times are those of the step model, so they do not depend on the machine.
    """
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    for size in map(int, sizes):
        config = EngineConfig(
            model=model, device="cpu", max_num_seqs=9, max_model_len=512, page_size=16,
            num_pages=100, max_num_batched_tokens=size,
        )  # fmt: skip
        with load(milestone).LLMEngine(config, loaded) as engine:
            for prompt in prompts_of([8] * 8):
                engine.add_request(prompt, SamplingParams(100, temperature=0, ignore_eos=True))
            while any(r.num_output_tokens == 0 for r in engine.core.scheduler.running) or (
                engine.core.scheduler.waiting
            ):
                engine.step()
            name, first, steps = engine.add_request(prompts_of([480], 1)[0]), False, list[int]()
            while not first:
                before = engine.stats()
                outputs, after = engine.step(), engine.stats()
                steps.append(
                    after.prefill_tokens + after.decode_tokens
                    - before.prefill_tokens - before.decode_tokens
                )  # fmt: skip
                first = any(output.request_id == name for output in outputs)
        times = [STEP_MS + TOKEN_MS * num_tokens for num_tokens in steps]
        yield f"{size}", f"{len(steps)}", f"{sum(times):.0f}", f"{max(steps)}", f"{max(times):.0f}"


def by_pool(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m4: three turns of eight users. All prompts begin with the same tokens."""
    [stem] = prompts_of([32], seed=1)
    prompts = [stem + prompt for prompt in prompts_of([16] * 8, seed=2)]
    turns = [prompts_of([12, 12], seed=10 + user) for user in range(8)]
    for size in map(int, sizes):
        config = {
            "model": model, "max_num_seqs": 2, "max_model_len": 128, "page_size": 8,
            "num_pages": size, "attention_backend": "torch",
        }  # fmt: skip
        result = measured(milestone, Workload(prompts, [8] * 8, True, config, follow_ups=turns))
        stats = result.stats
        yield (
            f"{size}", f"{8 * size}", f"{result.hit_rate:.0%}", f"{stats['prefill_tokens']}"
        )  # fmt: skip


def by_prefix(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m4: a decode step of 16 requests that have a prefix in common and 16 tokens of their own.

    Attention reads the pages of each row, also those that rows share.
    """
    config = EngineConfig(
        model=model, device="cpu", max_model_len=512, page_size=16, num_pages=600, max_num_seqs=16
    )
    loaded = load_model(config)
    with load(milestone).LLMEngine(config, loaded) as engine:
        pool = engine.core.runner.kv_pool
        page_mb = sum(tensor[:, 0].nbytes for tensor in (*pool.keys, *pool.values)) / 1e6
        for size in map(int, sizes):
            [stem] = prompts_of([size], seed=1)
            engine.reset_prefix_cache()
            params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
            for own in prompts_of([16] * 16, seed=2):
                engine.add_request(stem + own, params)
            while len(rows := engine.core.scheduler.running) < 16 or any(
                request.num_output_tokens == 0 for request in rows
            ):
                engine.step()
            read = [page for r in rows for page in engine.core.scheduler.kv_cache.pages_of(r)]
            once = len(set(read))
            yield (
                f"{size}", f"{page_mb * len(read):.1f}", f"{page_mb * once:.1f}",
                f"{once / len(read):.2f}",
            )  # fmt: skip
            while engine.has_unfinished_requests():
                engine.step()
