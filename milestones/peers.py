"""Engines of others, measured on the same workloads: `python -m milestones.peers hf-static`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

import torch

from common import EngineConfig, LoadedModel, load_model
from common.workload import Workload, WorkloadResult


def hf_static(loaded: LoadedModel, workload: Workload) -> WorkloadResult:
    """Hugging Face `generate` on one padded batch, which is done when its longest member is."""
    longest = max(map(len, workload.prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in workload.prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts]
    started = time.perf_counter()
    tokens = loaded.model.generate(  # type: ignore[operator]
        torch.tensor(padded, device=loaded.model.device),
        attention_mask=torch.tensor(mask, device=loaded.model.device),
        max_new_tokens=max(workload.max_tokens),
        min_new_tokens=max(workload.max_tokens) if workload.ignore_eos else None,
        do_sample=False,
        pad_token_id=0,
    )[:, longest:].tolist()
    seconds = time.perf_counter() - started
    outputs = [row[:n] for row, n in zip(tokens, workload.max_tokens, strict=True)]
    return WorkloadResult(outputs, seconds, [seconds] * len(outputs))


PEERS = {"hf-static": hf_static}


def main() -> None:
    """Read a workload from standard input, write the result to standard output."""
    peer = PEERS[sys.argv[1]]
    workload = Workload(**json.load(sys.stdin))
    loaded = load_model(EngineConfig(**workload.config), plain=True)
    peer(loaded, workload.warm_up())
    sys.stdout.write(json.dumps(asdict(peer(loaded, workload))))


if __name__ == "__main__":
    main()
