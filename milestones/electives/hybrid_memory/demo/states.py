"""Prompts with one beginning on a model with recurrent states: what each of them finds."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from common import EngineConfig, SamplingParams

from .. import LLMEngine

WITH_STATES = "tiny-qwen3_next"  # random weights
STEM, TAIL = 45, 20  # tokens that the prompts share, and that they do not


def show_states(console: Console, readable: bool) -> None:
    """Serve four prompts one after the other. The last one is the third again."""
    transformers_logging.set_verbosity_error()  # it would name kernels that only a GPU needs
    config = EngineConfig(
        model=WITH_STATES, device="cpu", readable=readable, page_size=8, num_pages=256
    )
    shown = Table(title=f"{WITH_STATES}: {STEM + TAIL} tokens in a prompt, {STEM} of them the same")
    for column in ("prompt", "in the tree", "found", "computed", "snapshots"):
        shown.add_column(column, justify="right")
    stem = [5 + number % 250 for number in range(STEM)]
    with LLMEngine(config) as engine:
        kv_cache = engine.core.scheduler.kv_cache
        (states,) = kv_cache.allocator.states
        for name, number in (("first", 7), ("second", 8), ("third", 9), ("third again", 9)):
            prompt = [*stem, *[number] * TAIL]
            known = kv_cache.radix_cache.num_known_pages(prompt) * config.page_size
            (output,) = engine.generate([prompt], SamplingParams(max_tokens=1), progress=False)
            found = output.metrics.num_cached_tokens
            numbers = (known, found, len(prompt) - found, len(states.pages))
            shown.add_row(name, *map(str, numbers))
    console.print(shown)
    console.print(
        "The second prompt leaves a snapshot where the tree branches off, "
        "and the third one resumes there.\n"
    )
