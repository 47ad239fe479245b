"""The measurement of lora: adapters in one batch, and one adapter after the other."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from common import EngineConfig, LoRARequest, SamplingParams, load_model

from ...chain import load
from ...lab.instruments.random_adapter import write_adapter
from .measuring import Row, prompts_of

ROUNDS = 2
NUM_REQUESTS = 16
RANK, OUTPUT = 8, 16


def by_batch(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """lora: requests of so many adapters, all in one batch, one adapter after the other, and none.

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
