"""The measurement of the sampler for `gpu-check`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from common import Request, SamplingParams
from common.hf.tiny import byte_tokenizer
from common.sampling.choice import choose
from common.sampling.draws import choose_in_torch
from common.sampling.sampler import SamplingMetadata, sample
from common.text.output_text import OutputText

SAMPLERS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 0.6, "top_k": 40},
    "top_p": {"temperature": 0.6, "top_p": 0.95},
    "top_k and top_p": {"temperature": 0.6, "top_k": 40, "top_p": 0.95},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}
MOST_DIFFERENT = 2  # tokens on the border between two: the kernels round sums in another way


def sampling(device: str, rows: int = 256, vocab_size: int = 151_936) -> dict[str, Any]:
    """Measure `sample` with each kind of parameters. On a GPU, a hidden wait raises an error.

    `in_torch_us`: without the kernels. `different`: rows that get another token than in torch.
    """
    logits = torch.randn(rows, vocab_size, device=device)
    tokenizer, times, in_torch, different = byte_tokenizer(), {}, {}, 0
    for name, given in SAMPLERS.items():
        params = [SamplingParams(seed=i, **given) for i in range(rows)]  # type: ignore[arg-type]
        requests = [
            Request("r", None, [1] * 5, p, seed=i, max_model_len=100,
                    text=OutputText(tokenizer, p), arrival_time=0.0)
            for i, p in enumerate(params)
        ]  # fmt: skip
        metadata = SamplingMetadata.from_requests(requests, device)
        sample(logits, metadata)
        times[name] = 1e6 * _without_waits(partial(sample, logits, metadata), device)
        if (draws := metadata.draws) is not None:
            tokens, expected = choose(logits, draws)[0], choose_in_torch(logits, draws)[0]
            different += int((tokens != expected).sum())
            work = partial(choose_in_torch, logits, draws)
            in_torch[name] = 1e6 * _without_waits(work, device)
    return {
        "rows": rows,
        "vocab_size": vocab_size,
        "us": times,
        "in_torch_us": in_torch,
        "different": different,
        "passed": different <= MOST_DIFFERENT,
    }


def _without_waits(work: Callable[[], Any], device: str, calls: int = 10) -> float:
    """Return the time of a call. It raises an error if the call waits for the GPU."""
    on_gpu = device != "cpu"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    started = time.perf_counter()
    try:
        for _ in range(calls if on_gpu else 1):
            work()
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    return (time.perf_counter() - started) / (calls if on_gpu else 1)
