"""Measure Hugging Face's engines on the same workloads: `python -m milestones.lab.bench.peers`.

Neither engine supports arrivals or turns. All requests of a turn are present when the turn starts,
which is an advantage for them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from common import EngineConfig, LoadedModel, load_model
from common.displays.workload import Workload, WorkloadResult

HF_PAGE_SIZE = 32

Generate = Callable[[LoadedModel, list[list[int]], list[int], float], list[list[int]]]


def sampling(temperature: float) -> dict[str, Any]:
    """Return Hugging Face's parameters: without its own top-k of 50."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def hf_static(
    loaded: LoadedModel, prompts: list[list[int]], max_tokens: list[int], temperature: float
) -> list[list[int]]:
    """Call Hugging Face `generate` on one padded batch, which ends with its longest request."""
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    model: Any = loaded.model
    tokens = model.generate(
        torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=max(max_tokens),
        min_new_tokens=max(max_tokens),
        pad_token_id=0,
        **sampling(temperature),
    )[:, longest:].tolist()
    return [row[:n] for row, n in zip(tokens, max_tokens, strict=True)]


def hf_batch(
    loaded: LoadedModel, prompts: list[list[int]], max_tokens: list[int], temperature: float
) -> list[list[int]]:
    """Call Hugging Face `generate_batch` (continuous batching), with the largest `max_tokens`."""
    model: Any = loaded.model
    config = GenerationConfig(
        max_new_tokens=max(max_tokens), eos_token_id=-1, pad_token_id=0, **sampling(temperature)
    )
    longest = max(len(prompt) + n for prompt, n in zip(prompts, max_tokens, strict=True))
    # Memory for all requests at once. By default `generate_batch` takes all memory, which takes a
    # minute.
    memory: Any = ContinuousBatchingConfig(
        num_blocks=len(prompts) * (longest // HF_PAGE_SIZE + 2), max_batch_tokens=2048
    )
    # Newer versions of transformers say page for block.
    setattr(memory, "page_size" if hasattr(memory, "page_size") else "block_size", HF_PAGE_SIZE)
    outputs = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=memory
    )
    by_prompt = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    return [by_prompt[tuple(p)][:n] for p, n in zip(prompts, max_tokens, strict=True)]


PEERS: dict[str, Generate] = {"hf-static": hf_static, "hf-batch": hf_batch}


def run_peer(generate: Generate, loaded: LoadedModel, workload: Workload) -> WorkloadResult:
    """Serve all requests at the same time, then all their next turns, and so on."""
    users = len(workload.prompts)
    prompts, answers = workload.prompts, [list[list[int]]() for _ in range(users)]
    first_token_seconds: list[float] = []
    begin = time.perf_counter()
    for turn in range(1 + len((workload.follow_ups or [[]])[0])):
        if turn > 0:
            said = [follow_up[turn - 1] for follow_up in workload.follow_ups]
            prompts = [p + a[-1] + s for p, a, s in zip(prompts, answers, said, strict=True)]
        started = time.perf_counter()
        said_now = generate(loaded, prompts, workload.max_tokens, workload.temperature)
        for answer, tokens in zip(answers, said_now, strict=True):
            answer.append(tokens)
        first_token_seconds += [time.perf_counter() - started] * users  # the engine does not stream
    tokens_of = [tokens for answer in answers for tokens in answer]
    return WorkloadResult(tokens_of, time.perf_counter() - begin, first_token_seconds)


def main() -> None:
    """Read a workload from standard input, and write the result to standard output."""
    generate = PEERS[sys.argv[1]]
    workload = Workload(**json.load(sys.stdin))
    loaded = load_model(EngineConfig(**workload.config), plain=True)
    words, sys.stdout = sys.stdout, sys.stderr  # the engine may print
    run_peer(generate, loaded, workload.warm_up())
    words.write(json.dumps(asdict(run_peer(generate, loaded, workload))))
    words.flush()  # Python flushes only `sys.stdout` at exit, and `words` is not that any more


if __name__ == "__main__":
    main()
