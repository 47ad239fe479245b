"""Check overlap on a device: the same answers in all settings, and no hidden synchronization."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from common import EngineConfig, SamplingParams

MILESTONE = "m5_overlap"
NUM_REQUESTS = 20


def check_overlap(device: str, model: str = "tiny-qwen3") -> list[dict[str, Any]]:
    """Run serial and overlapped, with and without CUDA graphs. Return a row of results for each.

    A row has the gap between forwards and the time per step. On CUDA, a launch that would wait for
    the device raises an error.
    """
    engine_class = importlib.import_module(MILESTONE).LLMEngine
    prompts = [[5 + i] * (1 + 3 * i) for i in range(NUM_REQUESTS)]
    params = [
        SamplingParams(max_tokens=8 + 5 * (i % 7), temperature=i % 2, seed=i, ignore_eos=True)
        for i in range(NUM_REQUESTS)
    ]
    rows: list[dict[str, Any]] = []
    expected: list[list[int]] | None = None
    for cuda_graph in (False, True):
        for overlap in (False, True):
            config = EngineConfig(
                model=model, device=device, dtype="float32", max_num_seqs=12,
                enable_overlap=overlap, cuda_graph=cuda_graph, seed=0,
            )  # fmt: skip
            with engine_class(config) as engine, without_waits(engine.core.runner):
                started = time.perf_counter()
                outputs = engine.generate(prompts, params, progress=False)
                seconds = time.perf_counter() - started
                engine.check_invariants()
                spans = list(engine.core.runner.stream.spans)
            answers = [output.outputs[0].token_ids for output in outputs]
            expected = expected or answers
            rows.append(
                {
                    "cuda_graph": cuda_graph,
                    "enable_overlap": overlap,
                    "passed": answers == expected,
                    "gap_us": 1e6 * median(b[0] - a[1] for a, b in pairwise(spans)),
                    "step_us": 1e6 * seconds / engine.stats().num_steps,
                }
            )
    return rows


@contextmanager
def without_waits(runner: Any) -> Iterator[None]:
    """Inside this context, torch raises if the launch of a step would wait for the GPU."""
    launch = runner.launch

    def watched(*args: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(*args)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    if runner.model.device.type == "cuda":
        runner.launch = watched
    yield
