"""The measurement of `vision`: what the encoder cache and the keys of images save."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

from common import EngineConfig, SamplingParams, load_model
from common.displays.workload import percentile
from common.virtual_time import use_virtual_time

from ...chain import load
from ...lab.instruments.random_images import Piece, prompt_of
from .measuring import Row

MODEL = "tiny-qwen2_vl"
REQUESTS, ARRIVE_EVERY = 32, 2  # steps between two requests
IMAGE_SIZE = (5, 8)  # rows and columns of tokens
TEXT = 12  # tokens of a question
PAGE_SIZE = 4
WAYS = ("nothing", "encoder cache", "radix keys", "both")


def by_way(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """vision: the same requests with each cache. sizes: how many different images they have."""
    for images, way in product(sizes, WAYS):
        yield (f"{images:g}", way, *served(milestone, model, way, int(images)))


def requests_of(images: int) -> list[list[Piece]]:
    """Return prompts. In every second one, the question comes before the image."""
    chance = random.Random(0)
    prompts = []
    for number in range(REQUESTS):
        image = (number % images, *IMAGE_SIZE)
        question: list[Piece] = [chance.randrange(32, 127) for _ in range(TEXT)]
        prompts.append([*question, image, 260] if number // images % 2 else [image, *question])
    return prompts


def served(milestone: str, model: str, way: str, images: int) -> tuple[str, ...]:
    """Serve the requests. Return counters, and virtual milliseconds to the first token."""
    config = EngineConfig(
        model=model, device="cpu", max_num_seqs=8, max_model_len=128, page_size=PAGE_SIZE,
        num_pages=1024, max_num_batched_tokens=64, encoder_cache_size=4096,
    )  # fmt: skip
    prompts, finals = requests_of(images), list[Any]()
    with load(milestone).LLMEngine(config, load_model(config)) as engine:
        use_virtual_time(engine)
        restrict(engine.core.scheduler, way)
        steps = 0
        while prompts or engine.has_unfinished_requests():
            if prompts and steps % ARRIVE_EVERY == 0:
                params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
                engine.add_request(prompt_of(prompts.pop(0)), params)
            finals += [output for output in engine.step() if output.finished]
            steps += 1
        stats, times = engine.stats(), [1000 * o.metrics.time_to_first_token for o in finals]
        return (
            str(stats.num_encoded_images), str(stats.prefill_tokens),
            str(stats.cached_prompt_tokens), f"{percentile(times, 50):.0f}",
            f"{percentile(times, 95):.0f}", f"{1000 * engine.now():.0f}",
        )  # fmt: skip


def restrict(scheduler: Any, way: str) -> None:
    """Take away what a way does not have: prefixes in the tree, or images that no request holds."""
    cache = scheduler.encoder_cache
    if way not in ("radix keys", "both"):
        scheduler.kv_cache._cacheable_tokens = lambda _: []
        scheduler.admission.waits_for_prefix = lambda *_: False
    if way not in ("encoder cache", "both"):
        release = cache.release

        def release_and_forget(*args: Any, **more: Any) -> None:
            release(*args, **more)
            for entry in [e for e in cache.entries.values() if not e.holders]:
                cache.forget(entry.image)

        cache.release = release_and_forget
